"""Which parameters are hidden matrices, tables and vectors, for networks of every kind."""

import pytest
import torch
from torch import nn

from accordion_bench.config.components import build_components, build_model
from accordion_bench.optimizers.inner import MATRIX, TABLE, VECTOR, parameter_kinds
from tests.kit import composed


class Encoder(nn.Module):
    """Tokens, positions as a plain parameter, attention, an output layer tied to the embedding or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.pos_embed = nn.Parameter(torch.zeros(5, 8))
        self.start = nn.Parameter(torch.zeros(1, 1, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16)
        self.head = nn.Linear(8, 11)
        if tied:
            self.head.weight = self.tokens.weight


@pytest.mark.parametrize("tied", [True, False])
def test_a_transformer(tied):
    kinds = parameter_kinds(Encoder(tied))
    tables = {"tokens.weight", "pos_embed"} | (set() if tied else {"head.weight"})
    assert {name for name, kind in kinds.items() if kind == TABLE} == tables
    inside = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
    assert [name for name, kind in kinds.items() if kind == MATRIX] == [f"block.{name}" for name in inside]
    assert kinds["start"] == kinds["head.bias"] == kinds["block.norm1.weight"] == VECTOR


def test_only_what_is_trained_in_the_order_of_the_model():
    model = Encoder(False)
    model.block.requires_grad_(False)
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert list(parameter_kinds(model)) == trained


def test_a_column_is_a_vector():
    """Scales of ConvNeXt, [C, 1, 1], and a layer with one output."""
    model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 6), nn.Linear(6, 6), nn.Linear(6, 2))
    kinds = parameter_kinds(model)
    assert kinds["0.weight"] == kinds["1.weight"] == VECTOR
    assert kinds["2.weight"] == MATRIX and kinds["3.weight"] == TABLE


@pytest.mark.parametrize("typed, tables", [
    (["model=resnet8"], ["fc.weight"]),
    (["model=lstm_small", "dataset=pydocs"], ["embedding.weight"]),
    (["model=lstm_small", "dataset=pydocs", "model.tied=false"], ["embedding.weight", "decoder.weight"]),
    (["model=gpt_nano", "dataset=pydocs_bytes"], ["embedding.weight", "position_embedding.weight"]),
])  # fmt: skip
def test_networks_of_the_bench(typed, tables):
    config = composed.config(*typed)
    kinds = parameter_kinds(build_model(config.model, build_components(config, 4).dataset))
    assert [name for name, kind in kinds.items() if kind == TABLE] == tables
    assert sum(kind == MATRIX for kind in kinds.values()) >= 4
    assert all(kind == VECTOR for name, kind in kinds.items() if "bias" in name or "norm" in name or ".bn" in name)
