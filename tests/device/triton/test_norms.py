"""Norms by Triton: within 2 ulp of float64 sums, for buckets of any length; what is not finite stays."""

import math

import pytest
import torch

from accordion_bench.tensors.kernels.dense_kernels import Coordinates
from accordion_bench.tensors.kernels.table import LONGEST, Table

KINDS = {
    "l1": lambda x: x.abs().sum(1),
    "l2": lambda x: x.square().sum(1).sqrt(),
    "linf": lambda x: x.abs().amax(1),
    "sum": lambda x: x.sum(1),
    "below": lambda x: x.clamp_max(0).sum(1),
    "count": lambda x: (x < 0).sum(1).double(),
}


def norms(x_W, size, norm, gpu):
    from accordion_bench.tensors.kernels.on_gpu.norms import bucket_norms

    x_W = x_W.to(gpu.device)
    table = Table([x_W.shape[1]], [size], 4096, [0], [[0]])
    return bucket_norms(Coordinates([x_W]), table, [norm])[0].cpu()


@pytest.mark.parametrize(("n", "size"), [(1000, 1000), (1000, 333), (LONGEST + 5000, LONGEST + 4000)])
@pytest.mark.parametrize("norm", KINDS)
def test_sums_of_buckets_are_those_of_float64(gpu, norm, n, size):
    x_W = torch.randn(2, n, generator=torch.Generator().manual_seed(0))
    found = norms(x_W, size, norm, gpu)
    expected = torch.stack([KINDS[norm](part.double()) for part in x_W.split(size, dim=1)], dim=1)
    near = (found.float().view(torch.int32) - expected.float().view(torch.int32)).abs()
    assert found.dtype == torch.float64 and near.max() <= 2  # ulp


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("norm", ["l1", "l2", "linf"])
def test_what_is_not_finite_stays_in_long_buckets(gpu, norm, bad):
    x_W = torch.ones(1, LONGEST + 10)
    x_W[0, 3] = bad
    assert norms(x_W, LONGEST + 5, norm, gpu).isfinite().tolist() == [[False, True]]


def test_coordinates_of_float64_are_read_as_float32(gpu):
    x_W = torch.tensor([[1e-30, 3.0, 1e300]], dtype=torch.float64)
    assert norms(x_W, 2, "l2", gpu).tolist() == [[3.0, math.inf]]
