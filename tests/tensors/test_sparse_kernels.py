"""Kernels of sparse messages, against torch: the same entries, the same bytes, the same sums."""

import math

import numpy as np
import pytest
import torch

from accordion_bench.codecs import index_codes, selection
from accordion_bench.codecs.non_finite import NonFiniteRow
from accordion_bench.tensors import kernels

pytestmark = pytest.mark.skipif(not kernels.installed(), reason="the extra `fast` is not installed")

LENGTHS = [1, 0, 7, 64, 65, 1000, 4099, 65_536, 131_101]  # the last one has three tiles
LONG = len(LENGTHS) - 1
W = 2


def rows_of(kind: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors [W, N] whose rows are apart."""
    g = torch.Generator().manual_seed(0)
    whole = [torch.randn(W, n + 3, generator=g, dtype=dtype) ** 3 for n in LENGTHS]
    change = {
        "smooth": lambda x: x,
        "tied": lambda x: x.mul(2).round(),  # with -0.0
        "sparse": lambda x: x * (torch.rand(x.shape, generator=g) < 0.005),
        "signs": lambda x: x.sign(),
        "two values": lambda x: torch.where(torch.rand(x.shape, generator=g) < 0.1, 2.0, 1.0).to(dtype),
        "zero": lambda x: x * -0.0,
        "tiny": lambda x: x * 1e-42,
        "sorted": lambda x: x.sort().values,
    }[kind]
    return [change(x)[:, 1 : x.shape[1] - 2] for x in whole]


KINDS = ["smooth", "tied", "sparse", "signs", "two values", "zero", "tiny", "sorted"]


def encoded(rows_W: list[torch.Tensor], kept: list[int]) -> tuple[torch.Tensor, list[int], list[int]]:
    """Messages of the kernels, in a buffer of garbage; where each begins, and their sizes."""
    from accordion_bench.compressors.sparse_rows import encode_largest_

    sizes = [index_codes.sparse_bytes(x_W.shape[1], k) for x_W, k in zip(rows_W, kept, strict=True)]
    starts = [5 + sum(sizes[:t]) for t in range(len(sizes))]
    message_W = torch.full((len(rows_W[0]), 5 + sum(sizes)), 0xA5, dtype=torch.uint8)
    encode_largest_(message_W, starts, rows_W, kept)
    assert (message_W[:, :5] == 0xA5).all()
    return message_W, starts, sizes


CASES = [(kind, density, torch.float32) for kind in KINDS for density in (0.01, 0.3)]
CASES += [("smooth", density, torch.float32) for density in (0, 0.001, 0.99, 1)]
CASES += [(kind, 0.01, torch.float64) for kind in ("smooth", "tied")]


@pytest.mark.parametrize(("kind", "density", "dtype"), CASES)
def test_messages_and_sums_equal_those_of_torch(kind, density, dtype):
    rows_W = rows_of(kind, dtype)
    kept = [int(density * n) for n in LENGTHS]
    message_W, starts, sizes = encoded(rows_W, kept)
    sums_W, totals = ([torch.ones(rows, n, dtype=dtype) for n in LENGTHS] for rows in (W, 1))
    add(sums_W, message_W, starts, kept, -0.7)
    add(totals, message_W, starts, kept, 1.0, divisor=3)
    for t, (x_W, k) in enumerate(zip(rows_W, kept, strict=True)):
        indices_W = selection.top_indices(x_W, k)
        expected_W = index_codes.encode_sparse(indices_W, x_W.gather(1, indices_W).float(), x_W.shape[1])
        assert torch.equal(message_W[:, starts[t] : starts[t] + sizes[t]], expected_W)
        if x_W.shape[1]:
            own_W, total = (torch.ones(rows, x_W.shape[1], dtype=dtype) for rows in (W, 1))
            index_codes.add_sparse_(own_W, expected_W[None], k, -0.7)
            index_codes.add_sparse_(total, expected_W[:, None], k, 1.0)
            assert torch.equal(sums_W[t], own_W) and torch.equal(totals[t], total / 3)


def add(targets, message_A, starts, kept, alpha, divisor=1):
    from accordion_bench.compressors.sparse_rows import add_sparse_

    add_sparse_(targets, message_A, starts, kept, alpha, divisor)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_largest_and_refused_by_its_row(value):
    from accordion_bench.tensors.kernels.rows import Rows
    from accordion_bench.tensors.kernels.top import choose_largest

    for at in (0, 70_001):  # in the first and the second tile
        rows_W = rows_of("smooth", torch.float32)
        rows_W[LONG][1, at] = value
        with pytest.raises(NonFiniteRow) as refused:
            encoded(rows_W, [int(0.01 * n) for n in LENGTHS])
        assert refused.value.row == len(LENGTHS) + LONG
        chosen = choose_largest(Rows([rows_W[LONG]]), [1] * W)
        assert chosen.counts[3:].sum(1).tolist() == [at == 0, at > 0, 0]  # the three tiles of row 1
    encoded(rows_W, [0] * len(LENGTHS))  # nothing of it is sent


def test_a_double_that_float32_cannot_hold_is_refused():
    rows_W = [torch.ones(2, 10, dtype=torch.float64)]
    rows_W[0][1, 3] = 1e300
    with pytest.raises(NonFiniteRow) as refused:
        encoded(rows_W, [1])
    assert refused.value.row == 1


def test_a_sample_that_misleads_costs_time_but_no_entry():
    n = 200_003
    row = torch.randn(1, n, generator=torch.Generator().manual_seed(0))
    stride = selection.stride_of(n, n // 128)
    for level in (100.0, 0.0):  # all that the sample sees is large; or nothing
        changed = row.clone()
        changed[0, ::stride] = level + changed[0, ::stride] * 1e-3
        indices = selection.top_indices(changed, 2000)
        expected = index_codes.encode_sparse(indices, changed.gather(1, indices), n)
        assert torch.equal(encoded([changed], [2000])[0][:, 5:], expected)


def test_two_threads_write_and_add_what_one_does(monkeypatch):
    rows_W = [torch.randn(2, n, generator=torch.Generator().manual_seed(n)) for n in (1_600_017, 999)]
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        for density in (0.001, 0.1, 0.3):
            kept = [int(density * x_W.shape[1]) for x_W in rows_W]
            message_W, starts, _ = encoded(rows_W, kept)
            sums = [torch.zeros(1, x_W.shape[1]) for x_W in rows_W]
            add(sums, message_W, starts, kept, 1.0)
            found.append([message_W, *sums])
    for one, other in zip(found[:3], found[3:], strict=True):
        assert all(map(torch.equal, one, other))


def test_a_message_of_garbage_touches_nothing_outside_of_its_tensor():
    n, k = 70_000, 3_000
    g = torch.Generator().manual_seed(0)
    size = index_codes.sparse_bytes(n, k)
    for _ in range(10):
        message = torch.randint(0, 256, (1, size), generator=g, dtype=torch.uint8)
        whole = torch.zeros(3, n)
        add([whole[1:2]], message, [0], [k], 1.0)
        assert not whole[0].any() and not whole[2].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [10, 2_000])
def test_a_sampled_threshold_chooses_what_torch_chooses(kind, k):
    from accordion_bench.compressors import sparse_rows
    from accordion_bench.tensors.kernels.rows import Rows

    for dtype, share, offset in ((torch.float32, 0.01, 3), (torch.float64, 0.2, 1000), (torch.float32, 0.6, 0)):
        x_W = rows_of(kind, dtype)[LONG]
        chosen = sparse_rows.choose_about(Rows([x_W]), np.full(W, k), share, 0.8, 1.3, offset)
        messages_W = sparse_rows.encode_chosen(Rows([x_W]), chosen, 1)[0]
        for x, message in zip(x_W, messages_W, strict=True):
            indices = selection.sampled_top(x, k, share, 0.8, 1.3, offset)
            assert torch.equal(message, index_codes.encode_sparse(indices[None], x[indices].float()[None], len(x))[0])


@pytest.mark.parametrize("kind", KINDS)
def test_an_absolute_threshold_chooses_what_torch_chooses(kind):
    from accordion_bench.compressors import sparse_rows
    from accordion_bench.tensors.kernels.rows import Rows

    for dtype in (torch.float32, torch.float64):
        x_W = rows_of(kind, dtype)[LONG]
        for threshold in (1e-30, 1.0, 3.7, 1e6):
            chosen = sparse_rows.choose_above(Rows([x_W]), threshold, np.full(W, 5_000))
            for x, own in zip(x_W, sparse_rows.encode_chosen(Rows([x_W]), chosen, 1)[0], strict=True):
                indices = selection.at_least(x, threshold)
                if len(indices) > 5_000:
                    indices = selection.top_indices(x[None], 5_000)[0]
                assert torch.equal(own, index_codes.encode_sparse(indices[None], x[indices].float()[None], len(x))[0])


def test_signs_of_adacomp_equal_those_of_torch():
    """Entries of -s, 0 and s: their messages are those of `encode`, and what is decoded is the input."""
    from accordion_bench.compressors.adacomp import SparseSigns
    from accordion_bench.compressors.base import Context
    from accordion_bench.plan import TensorSpec

    codec, specs = SparseSigns(), [TensorSpec(str(n), (1, n)) for n in LENGTHS if n]
    for dtype, share in ((torch.float32, 0.01), (torch.float64, 0.3), (torch.float32, 0), (torch.float32, 1)):
        g = torch.Generator().manual_seed(0)
        signs_W = [torch.randint(0, 2, (W, spec.numel), generator=g) * 2.0 - 1 for spec in specs]
        rows_W = [(0.3 * s * (torch.rand(s.shape, generator=g) < share)).to(dtype) for s in signs_W]
        ctx, levels = Context(0, specs, [1] * len(specs)), [1.0] * len(specs)
        messages = codec.encode_all(rows_W, specs, levels, ctx, range(W))
        sums_W, totals = ({t: torch.ones_like(x[:rows]) for t, x in enumerate(rows_W)} for rows in (W, 1))
        codec.add_all_(sums_W, messages, specs, levels, ctx, -1.0)
        codec.add_all_(totals, messages, specs, levels, ctx, divisor=3)
        for t, x_W in enumerate(rows_W):
            for own, expected in zip(messages[t], codec.encode(x_W, specs[t], 1, ctx, []), strict=True):
                assert torch.equal(own, expected)
            assert torch.equal(sums_W[t], 1 - x_W.float().to(dtype))
            assert torch.equal(totals[t], ((1 + x_W[:1].float().to(dtype)) + x_W[1:].float().to(dtype)) / 3)


def test_a_message_that_is_shorter_than_its_count_is_refused():
    from accordion_bench.compressors.sparse_rows import add_chosen_

    for size, kept in ((10, 3), (100, -1)):
        with pytest.raises(ValueError, match="has not the size that its entries need"):
            add_chosen_([torch.zeros(1, 100)], [[torch.zeros(size, dtype=torch.uint8)]], [[kept]], header=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bins_send_what_torch_sends(dtype):
    from accordion_bench.compressors.adacomp import selected
    from accordion_bench.tensors.kernels.bins import send_lifted

    lengths = [n for n in LENGTHS if n]
    for kind in ("smooth", "tied", "zero"):
        grown_W = [x_W for x_W in rows_of(kind, dtype) if x_W.shape[1]]
        news_W = [x_W.flip(1) * 0.3 for x_W in grown_W]
        sizes = [min(n, size) for n, size in zip(lengths, [1, 7, 50, 500, 50, 7, 500, 70_000], strict=True)]
        sent_W, scales_W = send_lifted(grown_W, news_W, sizes)
        for t, size in enumerate(sizes):
            signs, scales = selected(grown_W[t], news_W[t], size)
            assert torch.allclose(scales_W[:, t], scales, rtol=2e-7, atol=0)  # a sum of doubles, rounded
            assert torch.equal(sent_W[t], signs * scales_W[:, t, None].to(dtype))


def test_a_bin_that_is_not_finite_makes_its_scale_so():
    from accordion_bench.tensors.kernels.bins import send_lifted

    for value in (math.nan, -math.inf):
        grown = torch.ones(2, 1000)
        grown[1, 500] = value
        scales_W = send_lifted([torch.ones(2, 9), grown], [torch.ones(2, 9), torch.ones(2, 1000)], [9, 50])[1]
        assert scales_W.isfinite().tolist() == [[True, True], [True, False]]
