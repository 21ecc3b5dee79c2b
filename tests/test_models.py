"""Every model YAML: size, shape of the output, gradients; the networks of the Accordion paper, to the parameter."""

import functools
import math

import pytest
import torch
from torch import nn

from accordion_bench.build import build
from accordion_bench.check import ConfigError
from accordion_bench.compressors.powersgd import PowerSGD
from accordion_bench.compressors.topk import TopK
from accordion_bench.models.resnet import Bottleneck, ResNet18
from accordion_bench.models.torchvision import MIN_SIZE, Torchvision
from accordion_bench.plan import TensorSpec
from accordion_bench.rng import seeded
from tests.helpers import yaml_names, yaml_node

WIKITEXT2 = 33_278  # tokens

# parameters with 10 classes (text: with WikiText-2's vocabulary), and how many tensors have two dimensions or more
SIZES = {
    "densenet": (1_000_618, 121),
    "googlenet": (6_166_250, 65),
    "imagenet_resnet101": (42_520_650, 105),
    "imagenet_resnet18": (11_181_642, 21),
    "imagenet_resnet50": (23_528_522, 54),
    "imagenet_vgg16": (134_301_514, 16),
    "lstm": (31_819_578, 7),
    "lstm_small": (4_557_054, 5),
    "resnet110": (1_727_962, 110),
    "resnet18": (11_173_962, 21),
    "resnet20": (269_722, 20),
    "resnet32": (464_154, 32),
    "resnet34": (21_282_122, 37),
    "resnet50": (23_520_842, 54),
    "resnet56": (853_018, 56),
    "resnet8": (75_290, 8),
    "senet18": (11_267_842, 37),
    "torchvision": (11_181_642, 21),
    "vgg16": (14_728_266, 14),
    "vgg19": (20_040_522, 17),
}
NAMES = yaml_names("model")
PAPER = {"vgg19": {"classifier": "paper"}, "senet18": {"stage4": 516}}  # options that Accordion's experiments set


def model(yaml: str, /, classes: int = 10, vocabulary: int = WIKITEXT2, **options) -> nn.Module:
    """The model of a YAML file with some options replaced."""
    text = yaml.startswith("lstm")
    sizes = {"vocabulary": vocabulary} if text else {"in_channels": 3, "num_classes": classes}
    return build({**yaml_node("model", yaml), **options}, "model", **sizes)


@functools.cache
def paper(name: str, classes: int) -> list[TensorSpec]:
    """The tensors of one of the paper's networks."""
    with torch.device("meta"):
        named = model(name, classes, **PAPER.get(name, {})).named_parameters()
    return [TensorSpec(tensor, tuple(p.shape)) for tensor, p in named]


def size(network: nn.Module) -> tuple[int, int]:
    params = list(network.parameters())
    return sum(p.numel() for p in params), sum(p.ndim > 1 for p in params)


def test_the_table_names_every_yaml():
    assert sorted(SIZES) == NAMES


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("lstm")])
def test_an_image_model_has_its_size_gives_logits_and_trains(name):
    network = model(name)
    assert size(network) == SIZES[name]
    side = max(8, getattr(network, "min_size", 1))
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    logits = network(x)
    assert logits.shape == (2, 10)
    nn.functional.cross_entropy(logits, torch.tensor([1, 7])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("lstm")])
def test_a_text_model_has_its_size_gives_logits_and_trains(name):
    with torch.device("meta"):
        assert size(model(name)) == SIZES[name]
    network = model(name, vocabulary=50)
    tokens = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(0))
    logits, state = network(tokens, None)
    assert logits.shape == (2, 6, 50) and all(part.shape[1] == 2 for part in state)
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize(
    "name, classes, parameters, tensors",
    [
        ("resnet18", 10, 11_173_962, 21),
        ("resnet18", 100, 11_220_132, 21),
        ("googlenet", 10, 6_166_250, 65),
        ("googlenet", 100, 6_258_500, 65),
        ("densenet", 10, 1_000_618, 121),
        ("densenet", 100, 1_035_268, 121),
        ("senet18", 10, 11_389_726, 37),
        ("senet18", 100, 11_436_256, 37),
        ("vgg19", 10, 20_565_834, 19),
    ],
)
def test_networks_of_the_accordion_paper(name, classes, parameters, tensors):
    specs = paper(name, classes)
    assert sum(spec.numel for spec in specs) == parameters
    assert sum(spec.ndim > 1 for spec in specs) == tensors


def powersgd_floats(specs: list[TensorSpec], rank: int) -> int:
    """The paper's count per step: (n + m) min(n, m, r) of each matrix, 1-D tensors dense."""
    by_hand = sum(sum(s.matrix) * min(*s.matrix, rank) if s.ndim > 1 else s.numel for s in specs)
    compressor = PowerSGD(rank, min_compression_rate=0)
    assert 4 * by_hand == sum(compressor.payload_bytes(spec, rank, 4) for spec in specs)
    return by_hand


def topk_floats(specs: list[TensorSpec], density: float) -> int:
    """The paper's count per step: value and index of each entry, of each of 4 workers."""
    by_hand = sum(2 * math.floor(density * s.numel) * 4 if s.ndim > 1 else s.numel for s in specs)
    compressor = TopK(density, count="floor")
    assert by_hand == sum(8 * compressor.kept(s, density) if s.ndim > 1 else s.numel for s in specs)
    return by_hand


@pytest.mark.parametrize(
    "name, classes, powersgd, topk",
    [
        ("resnet18", 10, (45_935, 82_260, 154_910), (262.87, 656.75, 2599.88)),
        ("googlenet", 10, (71_327, 118_932, 214_142), (145.16, 361.88, 1430.97)),
        ("resnet18", 100, (46_115, 82_530, 155_360), (263.95, 659.46, 2610.61)),
    ],
)
def test_floats_per_step(name, classes, powersgd, topk):
    """PowerSGD at ranks 1, 2, 4 per step; TopK at 10, 25, 99 % in billions over 300 epochs of 98 steps."""
    specs = paper(name, classes)
    assert tuple(powersgd_floats(specs, rank) for rank in (1, 2, 4)) == powersgd
    run = [topk_floats(specs, density) * 29_400 / 1e9 for density in (0.10, 0.25, 0.99)]
    assert run == pytest.approx(topk, abs=0.005)


# Tables 1 to 4 of Agarwal et al. 2021 (arXiv 2010.16248), static rows; millions and billions of floats
MILLIONS = [
    ("resnet18", 10, 2, 2418.4, 300),
    ("resnet18", 10, 1, 1350.4, 300),
    ("vgg19", 10, 4, 6752.0, 300),
    ("vgg19", 10, 1, 2074.9, 300),
    ("senet18", 10, 4, 4361.3, 249),  # the printed cells are those of 249 epochs
    ("senet18", 10, 1, 1392.6, 249),
    ("resnet18", 100, 2, 2426.3, 300),
    ("resnet18", 100, 1, 1355.7, 300),
    ("densenet", 100, 2, 3387.4, 300),
    ("densenet", 100, 1, 2155.6, 300),
    ("senet18", 100, 2, 2878.1, 300),
    ("senet18", 100, 1, 1683.1, 300),
]
BILLIONS = [
    ("resnet18", 10, 1.00, 2626.1),  # printed as 99 %
    ("resnet18", 10, 0.10, 262.8),
    ("googlenet", 10, 0.99, 1430.9),
    ("googlenet", 10, 0.10, 145.2),
    ("senet18", 10, 0.99, 2648.7),
    ("senet18", 10, 0.10, 267.9),
    ("resnet18", 100, 1.00, 2636.9),  # printed as 99 %
    ("resnet18", 100, 0.25, 659.4),
    ("googlenet", 100, 0.99, 1452.4),
    ("googlenet", 100, 0.25, 367.3),
    ("senet18", 100, 0.99, 2659.5),
    ("senet18", 100, 0.25, 671.9),
]


def test_volumes_that_the_accordion_paper_prints():
    """Within one unit of the last printed digit: most cells are cut off, some are rounded."""
    for name, classes, rank, printed, epochs in MILLIONS:
        assert powersgd_floats(paper(name, classes), rank) * 98 * epochs / 1e6 == pytest.approx(printed, abs=0.1)
    for name, classes, density, printed in BILLIONS:
        assert topk_floats(paper(name, classes), density) * 29_400 / 1e9 == pytest.approx(printed, abs=0.1)


@pytest.mark.parametrize("name", ["densenet", "vgg16", "vgg19"])
def test_smallest_image(name):
    network = model(name).eval()
    assert network(torch.zeros(1, 3, network.min_size, network.min_size)).shape == (1, 10)
    with pytest.raises(RuntimeError):
        network(torch.zeros(1, 3, network.min_size - 1, network.min_size - 1))


def test_fewer_dense_blocks_take_smaller_images():
    network = model("densenet", blocks=[2, 2]).eval()
    assert network(torch.zeros(1, 3, 2, 2)).shape == (1, 10) and network.min_size == 2


MEMBERS = {
    "convnext": "convnext_tiny",
    "densenet": "densenet121",
    "inception": "inception_v3",
    "maxvit": "maxvit_t",
    "swin": "swin_t",
    "vgg": "vgg11",
    "vit": "vit_b_32",
}


@pytest.mark.parametrize("family", MIN_SIZE)
def test_smallest_image_of_torchvision(family):
    with torch.device("meta"):
        network = Torchvision(3, 10, MEMBERS.get(family, family))
        assert network.min_size == MIN_SIZE[family]
        # in training, too: networks with auxiliary heads give plain logits
        assert network(torch.zeros(2, 3, network.min_size, network.min_size)).shape == (2, 10)
        with pytest.raises((RuntimeError, AssertionError, ValueError)):
            network.eval()(torch.zeros(2, 3, network.min_size - 1, network.min_size - 1))


@pytest.mark.parametrize(
    "name, parameters",
    [
        ("imagenet_resnet18", 11_689_512),
        ("imagenet_resnet50", 25_557_032),
        ("imagenet_resnet101", 44_549_160),
        ("imagenet_vgg16", 138_357_544),
    ],
)
def test_imagenet_has_1000_classes(name, parameters):
    with torch.device("meta"):
        assert size(model(name, 1000))[0] == parameters


def test_first_values():
    """Convolutions N(0, 2 / fan_out) with zero biases, in every network of ours."""
    for name in ("resnet20", "resnet50", "vgg16", "densenet", "googlenet", "senet18"):
        with seeded(0):
            convolutions = [m for m in model(name).modules() if isinstance(m, nn.Conv2d)]
        for m in convolutions:
            assert m.bias is None or not m.bias.any()
        fan_out = [m.out_channels * m.kernel_size[0] * m.kernel_size[1] for m in convolutions]
        unit = [m.weight.flatten() * math.sqrt(fan / 2) for m, fan in zip(convolutions, fan_out, strict=True)]
        assert torch.cat(unit).std().item() == pytest.approx(1, abs=0.01)


def test_the_paper_s_resnet18_keeps_its_first_values():
    """Same seed, same class path, same values as in results that are published."""
    with seeded(0):
        network = ResNet18(3, 10)
    assert network.conv.weight.flatten()[:3].tolist() == pytest.approx([-0.05027890, 0.08094241, 0.02223723])
    assert network.stages[3][0].shortcut[0].weight.double().sum().item() == pytest.approx(-23.82595342)


def test_the_5x5_branch_sees_five_by_five_pixels():
    branch = model("googlenet").features[1].branch5.eval()
    x = torch.zeros(1, 192, 9, 9, requires_grad=True)
    branch(x + torch.rand(1, 192, 9, 9))[0, :, 4, 4].sum().backward()
    seen = x.grad.abs().sum((0, 1)) > 0
    assert seen.nonzero().amin(0).tolist() == [2, 2] and seen.nonzero().amax(0).tolist() == [6, 6]


def test_a_gate_of_squeeze_and_excitation_weighs_channels():
    """With the gate at 1/2 and an identity shortcut: relu(y / 2 + x)."""
    block = model("senet18").blocks[0].eval()
    nn.init.zeros_(block.excite.weight)
    nn.init.zeros_(block.excite.bias)
    x = torch.randn(2, 64, 5, 5)
    y = block.conv2(block.conv1(x).relu()).relu()
    torch.testing.assert_close(block(x), (y / 2 + x).relu())


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("resnet20", {"depth": 21}, "model.depth must be 6n + 2, got 21; type model.depth=20"),
        ("vgg16", {"depth": 13}, "model.depth must be 16 or 19, got 13; type model.depth=16"),
        (
            "vgg16",
            {"classifier": "papers"},
            "model.classifier must be one of linear, paper, got papers; type model.classifier=paper",
        ),
        ("senet18", {"stage4": 8}, "model.stage4 must be an integer of at least 16, got 8; type model.stage4=512"),
        ("densenet", {"growth": 0}, "model.growth must be an integer of at least 1, got 0; type model.growth=12"),
        (
            "densenet",
            {"reduction": 0},
            "model.reduction must be a number above 0 and at most 1, got 0; type model.reduction=0.5",
        ),
        (
            "densenet",
            {"blocks": [6, 0]},
            "model.blocks must be a list of integers of at least 1, got [6,0]; type model.blocks=[6,12,24,16]",
        ),
        (
            "torchvision",
            {"name": "resnet19"},
            "model.name must be a classifier of torchvision, got resnet19; type model.name=resnet18",
        ),
    ],
)
def test_refused(name, options, message):
    with pytest.raises(ConfigError) as refused:
        model(name, **options)
    assert str(refused.value) == message


def test_torchvision_takes_colour_images():
    with pytest.raises(ConfigError) as refused:
        build(yaml_node("model", "imagenet_vgg16"), "model", in_channels=1, num_classes=10)
    assert str(refused.value) == (
        "model must be one that takes 1 channel with this dataset, got torchvision's vgg16, which takes 3; "
        "type model=resnet18, or a dataset of colour images"
    )


def test_a_bottleneck_has_no_parameter_free_shortcut():
    with pytest.raises(ConfigError, match="shortcut must be one of B"):
        Bottleneck(16, 16, 1, "A")
