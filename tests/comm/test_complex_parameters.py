"""A run of a model with complex parameters is that of the same model with pairs of reals, whatever the method."""

import pytest
import torch
from torch import Tensor, nn

from tests.kit import local


class Pairs(nn.Module):
    """A layer with weights [2] for each of its connections, read as complex numbers; in float64."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(3)
        first = torch.randn(in_channels * 64, 6, 2, generator=draws, dtype=torch.float64) / 8
        self.weight = nn.Parameter(self.kept(first))
        self.shift = nn.Parameter(self.kept(torch.zeros(6, 2, dtype=torch.float64)))
        self.last = nn.Linear(6, num_classes).double()

    def kept(self, pairs: Tensor) -> Tensor:
        return pairs

    def read(self, kept: Tensor) -> Tensor:
        return torch.view_as_complex(kept)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.double().flatten(1).to(torch.complex128) @ self.read(self.weight) + self.read(self.shift)
        return self.last(torch.cat([hidden.real.tanh(), hidden.imag.tanh()], 1)[:, 3:9])


class Complex(Pairs):
    """The same, of complex parameters."""

    def kept(self, pairs: Tensor) -> Tensor:
        return torch.view_as_complex(pairs)

    def read(self, kept: Tensor) -> Tensor:
        return kept


RUNS = [
    (),
    ("compressor=powersgd",),
    ("compressor=topk", "compressor.density=0.2"),
    ("compressor=qsgd",),
    ("compressor=signum",),
    ("sync=local_sgd", "sync.period=3"),
    ("sync=local_sgd", "sync.period=3", "sync.buffers=average"),
    ("sync=diloco", "sync.period=3"),
    ("sync=overlap_local_sgd", "sync.period=3"),
    ("sync=noloco", "sync.period=3"),
    ("sync=local_sgd", "sync.period=3", "sync.quorum=3", "sync.lateness=0.3"),
    ("adaptive=accordion", "compressor=powersgd"),
]


@pytest.mark.parametrize("typed", RUNS, ids=" ".join)
def test_complex_parameters_are_pairs_of_reals(typed, tmp_path):
    runs = [local.trained(tmp_path, f"model._target_=tests.comm.{__name__.rpartition('.')[2]}.{name}", *typed)
            for name in ("Complex", "Pairs")]  # fmt: skip
    for ours, theirs in zip(*map(local.consensus, runs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
    first, second = (run.summary() for run in runs)
    assert first["payload_bytes"] == second["payload_bytes"] > 0
    assert first["metric"] == second["metric"]
