"""Every model YAML: size, shape of the output, gradients; the networks of the Accordion paper, to the parameter."""

import functools
import math

import pytest
import torch
from torch import nn

from accordion_bench.models.resnet import Bottleneck, ResNet18
from accordion_bench.models.torchvision import MIN_SIZE, Torchvision
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import build
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.keyed_rng import seeded
from tests.kit.helpers import yaml_names, yaml_node

WIKITEXT2 = 33_278  # tokens

# parameters with 10 classes (words: WikiText-2's vocabulary; bytes: 256), and how many tensors have two dimensions or
# more
SIZES = {
    "densenet": (1_000_618, 121),
    "googlenet": (6_166_250, 65),
    "gpt2": (86_039_040, 50),
    "gpt_nano": (858_880, 18),
    "gpt_small": (10_844_160, 26),
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
    "vit_tiny": (4_027_786, 39),
}
NAMES = yaml_names("model")
BYTES = ["gpt2", "gpt_nano", "gpt_small"]
WORDS = ["lstm", "lstm_small"]
PAPER = {"vgg19": {"classifier": "paper"}, "senet18": {"stage4": 516}}  # options that Accordion's experiments set


def model(yaml: str, /, classes: int = 10, vocabulary: int = WIKITEXT2, **options) -> nn.Module:
    """The model of a YAML file with some options replaced."""
    sizes = {"vocabulary": vocabulary} if yaml in WORDS else {"in_channels": 3, "num_classes": classes}
    sizes = {"vocabulary": 256} if yaml in BYTES else sizes
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


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in (*WORDS, *BYTES)])
def test_an_image_model_has_its_size_gives_logits_and_trains(name):
    with seeded(0):
        network = model(name)
    assert size(network) == SIZES[name]
    # at 32 pixels the ImageNet form ends in single ones, and BatchNorm over two numbers has gradients beyond float32
    side = 64 if name.startswith("imagenet") else max(8, getattr(network, "min_size", 1))
    side = getattr(network, "image_size", side)
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    logits = network(x)
    assert logits.shape == (2, 10)
    nn.functional.cross_entropy(logits, torch.tensor([1, 7])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("name", WORDS)
def test_a_text_model_has_its_size_gives_logits_and_trains(name):
    with torch.device("meta"):
        assert size(model(name)) == SIZES[name]
    network = model(name, vocabulary=50)
    tokens = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(0))
    logits, state = network(tokens, None)
    assert logits.shape == (2, 6, 50) and all(part.shape[1] == 2 for part in state)
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("name", BYTES)
def test_a_model_of_bytes_has_its_size_gives_logits_and_trains(name):
    with torch.device("meta"):
        assert size(model(name)) == SIZES[name]
    network = model(name, layers=1, width=24, positions=9)
    tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
    logits = network(tokens)
    assert logits.shape == (2, 9, 256)
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


def test_a_narrow_vgg_is_as_deep():
    outputs = [16] * 2 + [32] * 2 + [64] * 4 + [128] * 8
    inputs = [3, *outputs[:-1]]
    convolutions = sum(9 * i * o + 3 * o for i, o in zip(inputs, outputs, strict=True))  # bias, BatchNorm's two
    assert size(model("vgg19", width=16)) == (convolutions + 129 * 10, 17)


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


@pytest.mark.sample(3)
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
        ("vgg16", {"width": 0}, "model.width must be an integer of at least 1, got 0; type model.width=64"),
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
