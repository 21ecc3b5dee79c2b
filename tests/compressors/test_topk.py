"""TopK and its wire formats."""

import math

import numpy as np
import pytest
import torch

from accordion_bench.codecs import packed_codes, selection
from accordion_bench.codecs.selection import top_indices
from accordion_bench.compressors.assemble import check_collective
from accordion_bench.compressors.compressor import NonFinite
from accordion_bench.compressors.topk import TopK
from accordion_bench.options.checks import ConfigError
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from tests.kit.helpers import SPECS, exchange_for, gradients


def sorted_top(row: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest magnitudes by a stable sort: ties go to the lower index."""
    return np.sort(np.argsort(-np.abs(row), kind="stable")[:k])


@pytest.mark.parametrize("k", [0, 1, 7, 50, 99, 100])
def test_selection_equals_sort(k):
    generator = torch.Generator().manual_seed(k)
    smooth = torch.randn(3, 100, generator=generator)
    tied = torch.randint(-3, 4, (3, 100), generator=generator).float()
    for rows in (smooth, tied, torch.zeros(3, 100), torch.ones(3, 100)):
        chosen = top_indices(rows, k)
        for row, indices in zip(rows, chosen, strict=True):
            assert indices.tolist() == sorted_top(row.numpy(), k).tolist()


LONG = 70_001  # searched in two passes


@pytest.mark.parametrize("k", [1, 70, 7_000, 17_500, 17_501, 69_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_selection_from_long_rows_equals_sort(k, dtype):
    generator = torch.Generator().manual_seed(k)
    smooth = torch.randn(LONG, generator=generator, dtype=dtype)
    tied = torch.randint(-40, 41, (LONG,), generator=generator).to(dtype)
    sparse = smooth * (torch.rand(LONG, generator=generator) < 0.01)
    tiny = smooth * 1e-42  # below the smallest normal float32
    sorted_ = smooth.sort().values
    rows = torch.stack([smooth, tied, sparse, tiny, sorted_, torch.zeros(LONG, dtype=dtype)])
    for row, indices in zip(rows, top_indices(rows, k), strict=True):
        assert np.array_equal(indices, sorted_top(row.numpy(), k))


def test_a_sample_that_misleads_costs_time_but_no_entry():
    row = torch.randn(LONG, generator=torch.Generator().manual_seed(0))
    stride = LONG // len(selection.strided_sample(row, LONG // 64)) + 1
    assert torch.equal(row[::stride].abs(), selection.strided_sample(row, LONG // 64))
    row[::stride] = torch.linspace(100, 200, len(row[::stride]))  # all that the sample sees is large
    assert np.array_equal(top_indices(row[None], 2000)[0], sorted_top(row.numpy(), 2000))


def test_a_sample_sees_all_rows_and_filter_taps():
    for shape in [(512, 256, 3, 3), (64, 64, 3, 3), (1000, 100), (30, 1001)]:
        index = torch.arange(math.prod(shape)).view(shape)
        seen = selection.strided_sample(index.flatten(), index.numel() // 10)
        for dimension, size in enumerate(shape):
            of_dimension = torch.unravel_index(seen, shape)[dimension]
            counts = torch.bincount(of_dimension, minlength=size) * size / len(seen)
            assert counts.min() > 0.4 and counts.max() < 2.5


@pytest.mark.parametrize("n", [50, LONG])
def test_not_a_number_is_refused_by_name(n):
    specs = [TensorSpec("good", (1, n)), TensorSpec("bad", (1, n))]
    xs_W = gradients(specs, workers=3, dtype=torch.float32).tensors
    exchange, plan = exchange_for("topk", 3, specs=specs, density=0.1, dtype=torch.float32)
    for value in (math.nan, math.inf):
        exchange.state["bad"]["residual_W"][2, 0, 7] = value
        with pytest.raises(NonFinite, match="input of worker 2 for bad"):
            exchange(xs_W, StepInfo(plan, 0, 0.1))


@pytest.mark.parametrize("n", [1, 2, 3, 12, 257, 1382, 357_710])
def test_the_smallest_of_all_sizes_is_found(n):
    for k in range(1, n + 1, max(1, n // 97)):
        low = packed_codes._low_bits(n, k)
        sizes = [
            sum(map(packed_codes._bytes, packed_codes._elias_fano_bits(n, k, bits))) for bits in range(n.bit_length())
        ]
        assert sizes[low] == min(sizes)


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 63, 257, 1000])
def test_index_codes_round_trip_and_have_the_predicted_size(n):
    generator = torch.Generator().manual_seed(n)
    for k in sorted({1, 2, n // 10, n // 3, n // 2, n - 1, n} & set(range(n + 1))):
        indices = torch.stack([torch.randperm(n, generator=generator)[:k].sort().values for _ in range(3)])
        edges = torch.stack([torch.arange(k), torch.arange(n - k, n)])
        for rows in (indices, edges):
            message = packed_codes.encode_indices(rows, n)
            assert message.dtype == torch.uint8 and message.shape == (len(rows), packed_codes.index_bytes(n, k)[1])
            assert torch.equal(packed_codes.decode_indices(message, n, k), rows)


@pytest.mark.parametrize("count", range(0, 34))
def test_bits_round_trip_in_a_fixed_order(count):
    bits = torch.rand(2, count, generator=torch.Generator().manual_seed(count)) < 0.5
    packed = packed_codes.pack_bits(bits)
    assert packed.shape == (2, -(-count // 8))
    assert torch.equal(packed_codes.unpack_bits(packed, count), bits)


def test_bit_order_is_pinned():
    bits = torch.tensor([[True, False, False, False, False, False, False, True, True]])
    assert packed_codes.pack_bits(bits).tolist() == [[0x81, 0x01]]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 77])
def test_both_devices_pack_alike(count):
    """The path that a GPU takes, run on the CPU, gives NumPy's bytes."""
    bits = torch.rand(3, count, generator=torch.Generator().manual_seed(0)) < 0.5
    packed = packed_codes.pack_bits(bits)
    assert torch.equal(packed, packed_codes.pack_bits_on_device(bits))
    assert torch.equal(bits, packed_codes._unpack_on_device(packed, count))


def specified_sizes(indices: np.ndarray, n: int) -> dict[str, float]:
    """Bytes of the specification's index formats for one real index list, straight from their definitions."""
    gaps = np.diff(indices, prepend=-1) - 1
    k = len(indices)
    delta = sum(1 + (gaps >= 128).astype(int) + (gaps >= 128**2).astype(int) + (gaps >= 128**3).astype(int))
    return {
        "int32": 4 * k,
        "bitmap": -(-n // 8),
        "byte delta": int(delta),
        "uint16 blocks": 2 * k + 4 * -(-n // 65536),
    }


@pytest.mark.parametrize("density", [0.0001, 0.001, 0.01, 0.1, 0.3, 0.99])
def test_no_format_without_bit_coding_is_smaller(density):
    n = 200_000
    k = max(1, int(density * n))
    indices = torch.randperm(n, generator=torch.Generator().manual_seed(1))[:k].sort().values
    ours = packed_codes.index_bytes(n, k)[1]
    assert ours <= min(specified_sizes(indices.numpy(), n).values())
    entropy = n / 8 * -(density * np.log2(density) + (1 - density) * np.log2(1 - density))
    assert ours <= max(entropy * 1.35, n / 8)


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("density", [0.05, 0.4, 0.99])
def test_update_is_the_mean_of_sorted_tops(density, workers):
    exchange, plan = exchange_for("topk", workers, density=density, error_feedback=False)
    xs_W = gradients(workers=workers).tensors
    for spec, x_W, update in zip(SPECS, xs_W, exchange(xs_W, StepInfo(plan, 0, 0.1)), strict=True):
        if spec.ndim < 2:
            torch.testing.assert_close(update, x_W.mean(0))
            continue
        expected = torch.zeros(spec.numel, dtype=torch.float64)
        for row in x_W.reshape(workers, -1):
            kept = sorted_top(row.numpy(), max(1, int(density * spec.numel)))
            expected[kept] += row[kept].float().double()  # values travel in fp32
        torch.testing.assert_close(update.reshape(-1), expected / workers, rtol=1e-12, atol=1e-12)


def test_carrier_follows_the_rule():
    """Sparse messages where they cost less wire than a dense all-reduce, and only there."""
    compressor, spec = TopK(), TensorSpec("m", (1000, 100))
    for workers in (2, 4, 8, 16, 64):
        for density in (0.001, 0.01, 0.1, 0.25, 0.469, 0.5, 0.99):
            sparse_wire = (workers - 1) * compressor.message_bytes(spec, density)
            dense_wire = 2 * (workers - 1) / workers * 4 * spec.numel
            assert compressor.pays(spec, density, workers) == (sparse_wire < dense_wire)
    assert compressor.pays(spec, 0.46, 4) and not compressor.pays(spec, 0.47, 4)  # the bitmap's break-even, .469


def test_faithful_switches():
    spec = [TensorSpec("m", (4, 5))]
    xs_W = gradients(spec).tensors
    mean, plan = exchange_for("topk", specs=spec, density=0.3, error_feedback=False)
    total, _ = exchange_for("topk", specs=spec, density=0.3, error_feedback=False, reduce="sum")
    torch.testing.assert_close(4 * mean(xs_W, StepInfo(plan, 0, 0.1))[0], total(xs_W, StepInfo(plan, 0, 0.1))[0])
    floor, plan = exchange_for("topk", specs=spec, density=0.01, error_feedback=False, count="floor")
    assert (floor(xs_W, StepInfo(plan, 0, 0.1))[0] == 0).all()
    assert floor.comm.ledger.columns()["payload_bytes"] == 0


@pytest.mark.parametrize("options", [{}, {"chunk": 4}, {"chunk": 4, "value_bits": 2}], ids=str)
@pytest.mark.parametrize("workers", [1, 4])
def test_a_mean_over_the_senders_divides_by_those_that_have_sent_a_coordinate(options, workers):
    spec, alone = [TensorSpec("m", (8, 12))], {"error_feedback": False, "density": 0.3, **options}
    xs_W = gradients(spec, workers=workers).tensors
    exchange, plan = exchange_for("topk", workers, specs=spec, reduce="senders", **alone)
    update = exchange(xs_W, StepInfo(plan, 0, 0.1))[0]
    single, plan = exchange_for("topk", 1, specs=spec, **alone)
    sent_A = torch.stack([single([x_W[None]], StepInfo(plan, 0, 0.1))[0] for x_W in xs_W[0]])
    senders = (sent_A != 0).sum(0)
    torch.testing.assert_close(update, sent_A.sum(0) / senders.clamp_min(1), rtol=1e-6, atol=0)
    assert workers == 1 or len(set(senders.view(-1).tolist())) > 2


def test_messages_are_gathered_where_senders_are_counted():
    """A dense all-reduce would not say who has sent what."""
    compressor = TopK(reduce="senders")
    assert compressor.pays(TensorSpec("m", (10, 10)), 0.99, 64)
    with pytest.raises(
        ConfigError, match=r"collective must be all_gather, because every worker must know which workers sent"
    ):
        check_collective(compressor, "tree")


def test_density_counts_are_exact():
    """0.29 x 100 is 28.999999999999996 in floating point; 29 entries are meant."""
    assert TopK().kept(TensorSpec("m", (10, 10)), 0.29) == 29
    assert TopK().kept(TensorSpec("m", (2, 2)), 0.1) == 1
