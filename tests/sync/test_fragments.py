"""Fragments: whole layers of any model, by turns; every tensor is in one of them."""

import itertools
import re

import pytest
from torch import nn

from accordion_bench.models.cifar_networks import VGG
from accordion_bench.models.lstm import LSTM
from accordion_bench.models.resnet import CifarResNet, ResNet18
from accordion_bench.models.transformer import GPT
from accordion_bench.options.checks import ValueRefused
from accordion_bench.plan import TensorSpec
from accordion_bench.sync.partial import StreamingDiLoCo
from accordion_bench.sync.what import fragments, layers_of
from tests.kit.timelines import specs_of

MODELS = {  # (the model, its layers, what stands before the first one, what stands after the last one)
    "gpt": (GPT(256, 4, 2, 8, 16), 4, ["embedding.weight", "position_embedding.weight"], ["norm.weight", "norm.bias"]),
    "resnet8": (CifarResNet(3, 10, 8), 3, ["conv.weight", "bn.weight", "bn.bias"], ["fc.weight", "fc.bias"]),
    "resnet18": (ResNet18(3, 10), 8, ["conv.weight", "bn.weight", "bn.bias"], ["fc.weight", "fc.bias"]),
    "lstm": (LSTM(50, hidden=8, layers=3), 3, ["embedding.weight"], ["decoder.bias"]),
    "vgg16": (VGG(3, 10, 16, "paper"), 16, [], []),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_our_models(name):
    model, *expected = MODELS[name]
    specs = specs_of(model)
    layers, before, after = layers_of(specs)
    names = [[specs[i].name for i in own] for own in (before, after)]
    assert [len(layers), *names] == expected
    assert [*before, *itertools.chain(*layers), *after] == list(range(len(specs)))


def test_fragments_are_strided_and_keep_the_models_order():
    specs = specs_of(MODELS["gpt"][0])
    first, second, third = fragments(specs, 3)

    def blocks(own):
        return {int(n) for i in own for n in re.findall(r"blocks\.(\d+)\.", specs[i].name)}

    assert [blocks(own) for own in (first, second, third)] == [{0, 3}, {1}, {2}]
    assert specs[first[0]].name == "embedding.weight" and specs[third[-1]].name == "norm.bias"
    assert sorted([*first, *second, *third]) == list(range(len(specs)))
    assert all(own == sorted(own) for own in (first, second, third))
    assert fragments(specs, 1) == [list(range(len(specs)))]


def test_more_fragments_than_layers_are_refused():
    """With the most that divide the period."""
    specs = specs_of(MODELS["gpt"][0])
    StreamingDiLoCo(period=8, fragments=4, delay=1).refuse_tensors(specs)
    with pytest.raises(ValueRefused, match=r"sync.fragments must be at most 4, .* 4 layers, got 5; type .*=3$"):
        StreamingDiLoCo(period=30, fragments=5, delay=1).refuse_tensors(specs)


NAMES = {
    "stages.0.1.conv1.weight": "stages.0.1",
    "layer1.0.conv1.weight": "layer1.0",
    "encoder.layers.encoder_layer_11.mlp.3.weight": "encoder.layers.encoder_layer_11",
    "transformer.h.2.ln_1.weight": "transformer.h.2",
    "features.denseblock1.denselayer2.conv1.weight": "features.denseblock1.denselayer2",
}


def test_modules_of_other_peoples_models_are_told_apart():
    """Two of each, with something before and after them."""
    for name, layer in NAMES.items():
        number = re.findall(r"\d+", layer)[-1]
        at = layer.rindex(number)
        second = layer[:at] + str(int(number) + 1) + name[len(layer) :]
        specs = [
            TensorSpec(own, (2, 3)) for own in ("wte.weight", name, f"{layer}.other.weight", second, "head.weight")
        ]
        assert layers_of(specs) == ([[1, 2], [3]], [0], [4]), name


def test_recurrent_modules_and_those_without_numbers():
    recurrent = specs_of(nn.ModuleDict({"embedding": nn.Embedding(5, 4), "rnn": nn.LSTM(4, 3, num_layers=2)}))
    assert layers_of(recurrent) == ([[1, 2, 3, 4], [5, 6, 7, 8]], [0], [])
    plain = specs_of(nn.ModuleDict({"a": nn.Linear(2, 3), "norm": nn.BatchNorm1d(3), "b": nn.Linear(3, 2)}))
    assert layers_of(plain) == ([[0, 1, 2, 3], [4, 5]], [], [])
    assert layers_of([]) == ([], [], [])
