"""GPT and ViT: their sizes, the attention's equations, causality, tied weights, first values, keyed dropout."""

import math

import pytest
import torch
from torch import Tensor, nn

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.worker_axis import Batch, WorkerAxis
from accordion_bench.config.components import build_model
from accordion_bench.datasets.images import Digits
from accordion_bench.datasets.pydocs import PyDocsBytes
from accordion_bench.datasets.token_windows import ByteDataset
from accordion_bench.models.transformer import GPT, SelfAttention, ViT
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import build
from accordion_bench.tensors.keyed_rng import kept_rng, seeded
from tests.kit.helpers import yaml_node

VOCABULARY = 40
NODE = {"_target_": "accordion_bench.models.transformer.GPT", "layers": 2, "heads": 3, "width": 12, "positions": 10}


def gpt(**options) -> GPT:
    with seeded(7):
        return GPT(VOCABULARY, **{"layers": 2, "heads": 3, "width": 12, "positions": 10} | options).double()


def vit(**options) -> ViT:
    with seeded(7):
        sizes = {"image_size": 8, "patch": 4, "layers": 2, "heads": 3, "width": 12}
        return ViT(1, 10, **sizes | options).double()


def tokens(batch: int = 3, length: int = 10) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def enlarged(network: nn.Module) -> nn.Module:
    """With first values so large that every term counts."""
    with torch.no_grad(), seeded(3):
        for parameter in network.parameters():
            parameter.normal_()
    return network


# ---- sizes


@pytest.mark.parametrize("name, layers, width", [("gpt_nano", 4, 128), ("gpt_small", 6, 384), ("gpt2", 12, 768)])
def test_a_gpt_has_as_many_parameters_as_its_formula(name, layers, width):
    node = yaml_node("model", name)
    with torch.device("meta"):
        network = build(node, "model", vocabulary=256)
    in_blocks = layers * (12 * width**2 + 13 * width)
    expected = (256 + node["positions"]) * width + in_blocks + 2 * width
    assert sum(p.numel() for p in network.parameters()) == expected


def test_gpt2_has_the_published_number_of_parameters():
    with torch.device("meta"):
        network = build(yaml_node("model", "gpt2"), "model", vocabulary=50_257)
    assert sum(p.numel() for p in network.parameters()) == 124_439_808


def test_vit_tiny_has_as_many_parameters_as_its_formula():
    with torch.device("meta"):
        network = build(yaml_node("model", "vit_tiny"), "model", in_channels=3, num_classes=10)
    patches = (3 * 4**2 + 1) * 192 + 8 * 8 * 192
    expected = patches + 9 * (12 * 192**2 + 13 * 192) + 2 * 192 + 193 * 10
    assert sum(p.numel() for p in network.parameters()) == expected == 4_027_786


# ---- equations


def slow_attention(layer: SelfAttention, x: Tensor) -> Tensor:
    """One sample, one head and one position at a time."""
    batch, length, width = x.shape
    size = width // layer.heads
    query, key, value = layer.qkv.weight.split(width)
    query_bias, key_bias, value_bias = layer.qkv.bias.split(width)
    heads = torch.zeros_like(x)
    for b in range(batch):
        q, k, v = x[b] @ query.T + query_bias, x[b] @ key.T + key_bias, x[b] @ value.T + value_bias
        for h in range(layer.heads):
            own = slice(h * size, (h + 1) * size)
            for t in range(length):
                seen = t + 1 if layer.causal else length
                scores = (k[:seen, own] @ q[t, own]) / math.sqrt(size)
                weights = scores.exp() / scores.exp().sum()
                heads[b, t, own] = weights @ v[:seen, own]
    return heads @ layer.out.weight.T + layer.out.bias


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_equals_its_equation(heads, causal):
    with seeded(1):
        layer = SelfAttention(8, heads, causal, dropout=0.0).double()
        x = torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(layer(x), slow_attention(layer, x), rtol=1e-12, atol=1e-12)


def normalised(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def through(blocks: nn.Sequential, x: Tensor) -> Tensor:
    for block in blocks:
        x = x + slow_attention(block.attention, normalised(x, block.attention_norm))
        wide = normalised(x, block.mlp_norm) @ block.widen.weight.T + block.widen.bias
        gelu = wide * (1 + torch.erf(wide / math.sqrt(2))) / 2
        x = x + gelu @ block.narrow.weight.T + block.narrow.bias
    return x


def test_gpt_equals_its_equations():
    network, x = enlarged(gpt()), tokens()
    y = through(network.blocks, network.embedding.weight[x] + network.position_embedding.weight)
    torch.testing.assert_close(network(x), normalised(y, network.norm) @ network.embedding.weight.T)


def test_vit_equals_its_equations():
    network = enlarged(vit())
    images = torch.randn(3, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    corners = [images[:, :, r : r + 4, c : c + 4].flatten(1) for r in (0, 4) for c in (0, 4)]
    patches = torch.stack(corners, 1) @ network.patches.weight.flatten(1).T + network.patches.bias
    y = normalised(through(network.blocks, patches + network.position_embedding), network.norm).mean(1)
    torch.testing.assert_close(network(images), y @ network.head.weight.T + network.head.bias)


def test_a_later_symbol_changes_no_earlier_logits():
    network, x = enlarged(gpt()).eval(), tokens()
    for t in range(10):
        other = x.clone()
        other[:, t] = (other[:, t] + 1) % VOCABULARY
        changed = (network(other) != network(x)).flatten(2).any(2)
        assert not changed[:, :t].any() and changed[:, t:].all()


def test_a_shorter_sequence_has_the_logits_of_the_longer_one():
    network, x = enlarged(gpt()), tokens()
    torch.testing.assert_close(network(x[:, :4]), network(x)[:, :4])


# ---- parameters


def test_the_tied_embedding_is_one_tensor_exchanged_once():
    specs = WorkerAxis(gpt(), Comm(2), seed=0).specs
    assert [spec.shape for spec in specs].count((VOCABULARY, 12)) == 1
    assert sum(spec.numel for spec in specs) == (VOCABULARY + 10) * 12 + 2 * (12 * 144 + 13 * 12) + 24


def test_the_tied_gradient_is_the_sum_of_both_uses():
    network, x = gpt(), tokens()
    nn.functional.cross_entropy(network(x).flatten(0, 1), x.flatten()).backward()
    used = network.embedding.weight.detach().clone().requires_grad_()
    y = nn.functional.linear(network.norm(_hidden(network, network.embedding.weight.detach(), x)), used)
    nn.functional.cross_entropy(y.flatten(0, 1), x.flatten()).backward()
    entering = network.embedding.weight.detach().clone().requires_grad_()
    y = nn.functional.linear(network.norm(_hidden(network, entering, x)), network.embedding.weight.detach())
    nn.functional.cross_entropy(y.flatten(0, 1), x.flatten()).backward()
    torch.testing.assert_close(network.embedding.weight.grad, used.grad + entering.grad)


def _hidden(network: GPT, embedding: Tensor, x: Tensor) -> Tensor:
    return network.blocks(embedding[x] + network.position_embedding.weight[: x.shape[1]])


def test_first_values():
    with seeded(0):
        network = GPT(256, layers=8, heads=4, width=128, positions=64)
    std = {name: p.std().item() for name, p in network.named_parameters() if p.ndim > 1}
    for name, found in std.items():
        last = name.endswith(("attention.out.weight", "narrow.weight"))
        assert found == pytest.approx(0.02 / math.sqrt(16) if last else 0.02, rel=0.03), name
    for name, p in network.named_parameters():
        if p.ndim == 1:
            assert bool((p == (1 if "norm" in name and name.endswith("weight") else 0)).all()), name


def test_an_untrained_gpt_guesses():
    with seeded(0):
        network = GPT(256, layers=4, heads=4, width=128)
    x = torch.randint(256, (4, 100), generator=torch.Generator().manual_seed(0))
    loss = nn.functional.cross_entropy(network(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    assert loss.item() / math.log(2) == pytest.approx(8, rel=0.02)


# ---- dropout


@pytest.mark.parametrize("make, x", [(gpt, tokens()), (vit, torch.ones(3, 1, 8, 8).double())], ids=["gpt", "vit"])
def test_dropout_is_off_in_evaluation_and_keyed_by_the_generator(make, x):
    network, plain = make(dropout=0.4), make()
    with kept_rng():
        drawn = []
        for seed in (3, 4, 3):
            torch.manual_seed(seed)
            drawn.append(network(x))
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    torch.testing.assert_close(network.eval()(x), plain(x))


def test_two_workers_on_one_model_have_gradients_of_their_own():
    network, x = gpt(), tokens(batch=4)
    axis = WorkerAxis(network, Comm(2), seed=0)

    def loss(part: Tensor) -> Tensor:
        return nn.functional.cross_entropy(network(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())

    for row in range(2):
        axis.backward(row, 0, Batch(lambda _, row=row: loss(x[2 * row : 2 * row + 2])))
    expected = torch.autograd.grad(loss(x), axis.params)
    for g_W, g in zip(axis.gradients_W, expected, strict=True):
        torch.testing.assert_close(g_W.mean(0), g)


# ---- refused


@pytest.mark.parametrize(
    "options, message",
    [
        ({"heads": 5}, "heads must be a divisor of width=12, got 5; type heads=4"),
        ({"layers": 0}, "layers must be an integer of at least 1, got 0; type layers=4"),
        ({"width": 0.5}, "width must be an integer of at least 1, got 0.5; type width=128"),
        ({"positions": 0}, "positions must be an integer of at least 1, got 0; type positions=256"),
        ({"dropout": 1}, "dropout must be a number at least 0 and below 1, got 1; type dropout=0.0"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ConfigError) as refused:
        gpt(**options)
    assert str(refused.value) == message


def test_a_patch_that_does_not_tile_the_image_is_refused():
    with pytest.raises(ConfigError, match="patch must be a divisor of image_size=8, got 3; type patch=2"):
        vit(patch=3)


def test_a_window_longer_than_the_positions_is_refused():
    data: ByteDataset = PyDocsBytes(context=11)
    rule = "dataset.context must be at most 10, the positions of model=gpt_nano, got 11; type dataset.context=10"
    with pytest.raises(ConfigError) as refused:
        build_model(NODE, data, "gpt_nano", "pydocs_bytes")
    assert str(refused.value) == rule
    build_model(NODE, PyDocsBytes(context=10))


def test_images_of_another_size_are_refused():
    node = yaml_node("model", "vit_tiny")
    with pytest.raises(ConfigError) as refused:
        build_model(node, Digits(), "vit_tiny", "digits")
    assert str(refused.value) == (
        "model.image_size must be 8, the side of the images of dataset=digits, got 32; type model.image_size=8"
    )
    assert build_model({**node, "image_size": 8}, Digits())(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_words_are_no_bytes():
    with pytest.raises(
        ConfigError, match="model=gpt_nano needs a data set of tokens, got dataset=digits; type dataset="
    ):
        build_model(NODE, Digits(), "gpt_nano", "digits")
