"""Kernels of sparse messages where samples mislead, numbers are not finite, and messages are a stranger's.

That they equal the reference is tested with the engines.
"""

import math

import pytest
import torch

from accordion_bench.codecs import engines, selection
from accordion_bench.codecs.bucket import NonFiniteRow, Target
from accordion_bench.codecs.layout import Message, SparseLayout
from accordion_bench.compressors.topk import TopK
from accordion_bench.tensors import kernels
from tests.kit.coded import coded

pytestmark = pytest.mark.skipif(not kernels.installed(), reason="the extra `fast` is not installed")

LONG = 131_101  # has three tiles


def normal(rows: int, n: int) -> torch.Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_largest(value):
    from accordion_bench.tensors.kernels.top import Rows, choose_largest

    for at in (0, 70_001):  # in the first and the second tile
        x_W = normal(2, LONG)
        x_W[1, at] = value
        chosen = choose_largest(Rows([x_W]), [1] * 2)
        assert chosen.counts[3:].sum(1).tolist() == [at == 0, at > 0, 0]  # the three tiles of row 1
        with pytest.raises(NonFiniteRow) as refused:
            coded(TopK(), x_W, level=0.01)
        assert refused.value.row == 1


def test_a_double_that_float32_cannot_hold_is_refused():
    x_W = torch.ones(2, 10, dtype=torch.float64)
    x_W[1, 3] = 1e300
    with pytest.raises(NonFiniteRow) as refused:
        coded(TopK(), x_W, level=0.1)
    assert refused.value.row == 1


def test_a_sample_that_misleads_costs_time_but_no_entry():
    n = 200_003
    row = normal(1, n)
    stride = selection.stride_of(n, n // 128)
    for level in (100.0, 0.0):  # all that the sample sees is large; or nothing
        changed = row.clone()
        changed[0, ::stride] = level + changed[0, ::stride] * 1e-3
        indices = selection.top_indices(changed, 2000)
        expected = torch.zeros_like(changed).scatter_(1, indices, changed.gather(1, indices))
        assert torch.equal(coded(TopK(), changed, level=2000 / n)[1], expected)


def test_a_message_of_garbage_touches_nothing_outside_of_its_tensor():
    layout, g = SparseLayout([70_000], [3_000]), torch.Generator().manual_seed(0)
    for _ in range(10):
        message = torch.randint(0, 256, (1, layout.nbytes), generator=g, dtype=torch.uint8)
        whole = torch.zeros(3, 70_000)
        engines._on_cpu().add_sparse(Target([whole[1:2]]), Message(message, [layout]))
        assert not whole[0].any() and not whole[2].any()


def test_a_bin_that_is_not_finite_makes_its_scale_so():
    for value in (math.nan, -math.inf):
        grown = torch.ones(2, 1000)
        grown[1, 500] = value
        news = [torch.ones(2, 9), torch.ones(2, 1000)]
        _, scales_W = engines._on_cpu().select_in_bins([torch.ones(2, 9), grown], news, [9, 50])
        assert scales_W.isfinite().tolist() == [[True, True], [True, False]]
