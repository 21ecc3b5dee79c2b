"""Tensors that the user exempts by words."""

from torch import nn

from accordion_bench.attaching.own_parameters import exempt_names


class Tied(nn.Module):
    """The output layer has the embedding's weight, and comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.table, self.norm = nn.Linear(4, 9), nn.Embedding(9, 4), nn.LayerNorm(4)
        self.head.weight = self.table.weight


def test_a_tied_weight_is_known_by_its_first_name():
    assert exempt_names("embedding", Tied()) == {"head.weight"}
    assert exempt_names("norm, bias", Tied()) == {"norm.weight", "norm.bias", "head.bias"}
    assert exempt_names(lambda name, param: param.dim() == 2, Tied()) == {"head.weight"}
