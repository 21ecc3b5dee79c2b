"""Random bits, bucket norms, stochastic rounding to levels, signs, and sums of decoded messages."""

import itertools
import math

import numpy as np
import pytest
import torch

from accordion_bench.compressors import packed_codes
from accordion_bench.compressors.non_finite_row import NonFiniteRow
from accordion_bench.compressors.rounding.norms import NORMS, bucket_norms
from accordion_bench.compressors.rounding.passes import CPU, DEVICE
from accordion_bench.compressors.rounding.signs import encode_scaled_signs, encode_signs
from accordion_bench.compressors.rounding.stochastic import encode_levels
from accordion_bench.compressors.rounding.sums import add_levels_, add_signs_
from accordion_bench.compressors.rounding.thresholds import rounding_to
from accordion_bench.compressors.rounding.tiling import bucket_count
from accordion_bench.tensors import counter_rng


def even(K: int) -> tuple[float, ...]:
    return tuple(np.linspace(-1, 1, K).tolist())


def mirrored(positives: list[float], zero: bool) -> tuple[float, ...]:
    return (*(-level for level in reversed(positives)), *([0.0] if zero else []), *positives)


CODEBOOKS = {
    "signs": even(2),
    "ternary": even(3),
    "even4": even(4),
    "even7": even(7),
    "even256": even(256),
    "exponential8": mirrored([0.125, 0.25, 0.5, 1.0], zero=False),
    "exponential7": mirrored([0.25, 0.5, 1.0], zero=True),
    "sixteen": mirrored([0.6**j for j in range(7, -1, -1)], zero=False),
    "asymmetric": (-1.0, -0.3, -0.05, 0.1, 0.15, 0.7, 1.0),
    "searched": mirrored([0.96**j for j in range(100, -1, -1)], zero=False),
}
SIZES = {
    "n < d": (5, 8),
    "n = d": (8, 8),
    "n = 2 d": (16, 8),
    "n = d + 1": (9, 8),
    "one": (1, 8),
    "whole row": (12, None),
}


def rows(R: int, n: int, seed: int = 0) -> torch.Tensor:
    """Rows with zeros of both signs and magnitudes that differ widely."""
    generator = torch.Generator().manual_seed(seed)
    x_R = torch.randn(R, n, generator=generator) * torch.rand(R, n, generator=generator) ** 3
    x_R[:, ::17], x_R[:, 5::29] = 0.0, -0.0
    return x_R


def spread(per_bucket_R: torch.Tensor, n: int, size: int | None) -> torch.Tensor:
    """One number per bucket [R, m] as one per coordinate [R, n]."""
    return per_bucket_R.repeat_interleave(size or max(n, 1), dim=1)[:, :n]


def decoded(message_R, norms_R, n, size, book) -> torch.Tensor:
    total_R = torch.zeros(len(message_R), n)
    add_levels_(total_R, message_R, norms_R, size, book)
    return total_R


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that a few ten thousand coordinates make several."""
    monkeypatch.setattr(CPU, "tile", 10 * counter_rng.BLOCK)
    monkeypatch.setattr(DEVICE, "tile", 5 * counter_rng.BLOCK)


# random bits


def random_bits(key: int, start: int, count: int) -> torch.Tensor:
    """Values start to start + count - 1 of a key's stream: 32 random bits each, int32 [count]."""
    words = counter_rng._words(key, start, count, "cpu")
    return words ^ ((words >> 16) & 0xFFFF)


def test_random_bits_depend_on_key_and_counter_alone():
    n = 3 * counter_rng.BLOCK + 100
    whole = random_bits(5, 0, n)
    for start, count in (
        (0, 1),
        (1, 7),
        (counter_rng.BLOCK - 1, 2),
        (counter_rng.BLOCK, n - counter_rng.BLOCK),
        (9, 0),
    ):
        assert torch.equal(random_bits(5, start, count), whole[start : start + count])
        assert torch.equal(counter_rng.uniforms(5, start, count), counter_rng.uniforms(5, 0, n)[start : start + count])
    far = 10**12
    assert torch.equal(random_bits(5, far, 9), random_bits(5, far - 50, 99)[50:59])
    for key in (0, 2**63 - 1, 2**64 - 1):
        assert counter_rng.uniforms(key, 0, 10).max() < 1


def test_both_devices_draw_alike_and_leave_the_global_generators():
    before, numpy_before = torch.get_rng_state(), str(np.random.get_state())
    keys = counter_rng.block_keys([3, 4], 0, 2)
    lanes = torch.empty(2, 2, counter_rng.BLOCK, dtype=torch.int32)
    counter_rng._fill_on_device(lanes, keys)
    assert torch.equal(lanes.flatten(1), counter_rng.fill_bits_(torch.empty_like(lanes).flatten(1), keys))
    encode_levels(torch.ones(1, 9), torch.ones(1, 1), None, even(3), [1])
    assert torch.equal(torch.get_rng_state(), before) and str(np.random.get_state()) == numpy_before


def standard_score(counts: np.ndarray) -> float:
    """Chi-square of counts that should be equal, in standard deviations."""
    expected = counts.sum() / len(counts)
    return (((counts - expected) ** 2 / expected).sum() - len(counts) + 1) / math.sqrt(2 * (len(counts) - 1))


def test_random_bits_look_random():
    n = 1 << 18
    streams = [random_bits(key, 0, n).numpy().view(np.uint32) for key in (0, 1, 2, 2**40)]
    for words in streams:
        for byte in range(4):
            assert abs(standard_score(np.bincount(words.view(np.uint8)[byte::4], minlength=256))) < 5
    pairs = [(words[lag:], words[:-lag]) for words in streams for lag in (1, 2, counter_rng.BLOCK)]
    pairs += [(streams[i], streams[j]) for i in range(4) for j in range(i)]
    for first, second in pairs:
        assert abs(standard_score(np.bincount((first >> 27) * 32 + (second >> 27), minlength=1024))) < 5
    for key in range(4):
        u = counter_rng.uniforms(key, 0, n).double() - 0.5
        assert abs(u.mean()) < 5 * math.sqrt(1 / 12 / n)
        assert abs((u * u).mean() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)


def test_random_bits_of_many_keys_are_uncorrelated():
    keys, n = 200, counter_rng.BLOCK
    u = torch.stack([counter_rng.uniforms(key, 0, n) for key in range(keys)]).double() - 0.5
    of_keys = (u @ u.T / n * 12 * math.sqrt(n)).numpy()[np.triu_indices(keys, 1)]
    lanes = u[:, :200]
    of_lanes = (lanes.T @ lanes / keys * 12 * math.sqrt(keys)).numpy()[np.triu_indices(200, 1)]
    for scores in (of_keys, of_lanes):
        assert abs(scores.mean()) < 5 / math.sqrt(len(scores)) and abs(scores.std() - 1) < 0.03
        assert abs(scores).max() < 5.5


# norms


@pytest.mark.sample(3)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("size", [None, 7, 64, 5000])
def test_norms_equal_exact_ones(norm, size, small_tiles):
    for n in (1, 63, 64, 65, 50_000):
        x_R = rows(3, n)
        out_R = bucket_norms(x_R, size, norm)
        assert out_R.dtype == torch.float32 and out_R.shape == (3, bucket_count(n, size))
        for row, out in zip(x_R.double().abs(), out_R, strict=True):
            for bucket, got in zip(row.split(size or n), out.tolist(), strict=True):
                exact = {
                    "l1": lambda b: math.fsum(b.tolist()),
                    "l2": lambda b: math.sqrt(math.fsum((b * b).tolist())),
                    "linf": lambda b: b.max().item(),
                }[norm](bucket)
                assert got == pytest.approx(exact, rel=0 if norm == "linf" else 2.5e-7, abs=0)
        torch.testing.assert_close(bucket_norms(x_R, size, norm, DEVICE), out_R, rtol=2.5e-7, atol=0)


@pytest.mark.parametrize("scale", [1e-30, 1e-38, 1e30, 1e35])
def test_norms_neither_overflow_nor_underflow(scale):
    x_R, length = torch.full((2, 10), scale), 4
    for norm, factor in (("l1", length), ("l2", math.sqrt(length)), ("linf", 1)):
        expected = torch.full((2,), scale * factor)
        torch.testing.assert_close(bucket_norms(x_R, length, norm)[:, 0], expected, rtol=3e-7, atol=0)


def test_norms_of_bad_values_tell():
    for bad in (math.nan, math.inf, -math.inf):
        for norm in NORMS:
            x_R = torch.ones(2, 10)
            x_R[1, 7] = bad
            finite = bucket_norms(x_R, 4, norm).isfinite()
            assert finite.tolist() == [[True] * 3, [True, False, True]]
    assert bucket_norms(torch.full((1, 100), 3e38), None, "l2").isinf().all()
    with pytest.raises(ValueError, match="l1, l2, linf"):
        bucket_norms(torch.ones(1, 1), None, "l3")


# levels


def rounded_slowly(x: torch.Tensor, norm: torch.Tensor, book: tuple[float, ...], u: torch.Tensor) -> list[int]:
    """Codes of one row by the definition, coordinate by coordinate in float64."""
    K, out = len(book), []
    for value, n, draw in zip(x.double().tolist(), norm.double().tolist(), u.double().tolist(), strict=True):
        r = min(max(value / n, -1), 1) if n else 0.0
        positives = [level for level in book if level > 0]
        if book == even(K):
            out.append(math.floor((r + 1) * (K - 1) / 2 + draw))
        elif list(book) == [-level for level in reversed(book)]:
            ends = positives if K % 2 == 0 else [0.0, *positives]
            m = sum(abs(r) > a + draw * (c - a) for a, c in itertools.pairwise(ends))
            positive = r > positives[0] * (2 * draw - 1) if K % 2 == 0 else r > 0
            out.append(K // 2 + m if positive else K - 1 - K // 2 - m)
        else:
            out.append(sum(r > a + draw * (c - a) for a, c in itertools.pairwise(book)))
    return out


@pytest.mark.parametrize("book", CODEBOOKS.values(), ids=CODEBOOKS.keys())
@pytest.mark.parametrize("size", [None, 50])
def test_codes_equal_slow_ones(book, size):
    n, keys = 1201, [11, 12]
    x_R = rows(2, n)
    norms_R = bucket_norms(x_R, size, "linf") * 0.9  # some coordinates lie beyond the outer levels
    message_R = encode_levels(x_R, norms_R, size, book, keys)
    codes_R = packed_codes.unpack_codes(message_R, len(book), n)
    bits = 24 - (len(book) - 1).bit_length()
    for row, norm, key, got in zip(x_R, spread(norms_R, n, size), keys, codes_R, strict=True):
        assert got.tolist() == rounded_slowly(row, norm, book, counter_rng.uniforms(key, 0, n, bits=bits))
    values_R = torch.tensor(book)[codes_R.long()] * spread(norms_R, n, size)
    assert torch.equal(decoded(message_R, norms_R, n, size, book), values_R)


@pytest.mark.parametrize("book", CODEBOOKS.values(), ids=CODEBOOKS.keys())
@pytest.mark.parametrize(("n", "size"), SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_rounding_is_unbiased_with_the_variance_of_the_formula(book, n, size, norm):
    draws = 4096
    x = torch.randn(1, n, generator=torch.Generator().manual_seed(n))
    norms_R = bucket_norms(x, size, norm).expand(draws, -1)
    message_R = encode_levels(x.expand(draws, -1), norms_R, size, book, range(draws))
    values_R = decoded(message_R, norms_R, n, size, book).double()
    norm_ = spread(norms_R[:1], n, size)[0].double()
    r, ends = (x[0].double() / norm_).clamp(-1, 1), torch.tensor(book, dtype=torch.float32).double()
    upper = torch.bucketize(r, ends).clamp(1, len(book) - 1)
    a, c = ends[upper - 1], ends[upper]
    variance = (c - r) * (r - a) * norm_**2
    error = values_R - r * norm_
    assert (error.mean(0).abs() <= 4.5 * (variance / draws).sqrt() + 1e-6 * norm_).all()
    p = (r - a) / (c - a)
    squares_sd = (variance.clamp_min(0) * (1 - 2 * p) ** 2).sqrt() * (c - a) * norm_  # of (Q - r)^2, two values
    assert ((error**2).mean(0) - variance).abs().le(4.5 * squares_sd / math.sqrt(draws) + 2e-6 * norm_**2).all()


def test_one_huge_coordinate_leaves_the_others_unbiased():
    n, draws = 1000, 3000
    x = torch.full((1, n), 1e-3)
    x[0, 3] = -1e4
    for book in (even(3), even(8), CODEBOOKS["exponential8"], CODEBOOKS["asymmetric"]):
        norms_R = bucket_norms(x, None, "linf").expand(draws, 1)
        message_R = encode_levels(x.expand(draws, -1), norms_R, None, book, range(draws))
        values_R = decoded(message_R, norms_R, n, None, book).double()
        assert (values_R[:, 3] == -1e4).all()
        others = torch.cat([values_R[:, :3], values_R[:, 4:]], dim=1)
        upper = next(level for level in book if level > 1e-7)
        lower = max(level for level in book if level <= 1e-7)
        deviation = 1e4 * math.sqrt((upper - 1e-7) * (1e-7 - lower) / others.numel())
        assert abs(others.mean() - 1e-3) < 4.5 * deviation


@pytest.mark.parametrize("book", CODEBOOKS.values(), ids=CODEBOOKS.keys())
def test_who_sits_on_a_level_keeps_it(book):
    ends = torch.tensor(book)
    x_R = ends.expand(3000, -1)
    message_R = encode_levels(x_R, torch.ones(3000, 1), None, book, range(3000))
    if book == even(len(book)) and len(book) > 3:  # their float32 neighbours are not exactly on the grid
        inner = decoded(message_R, torch.ones(3000, 1), len(book), None, book)[:, [0, -1]]
        assert torch.equal(inner, x_R[:, [0, -1]])
    else:
        assert torch.equal(decoded(message_R, torch.ones(3000, 1), len(book), None, book), x_R)
    for norm in (3.0, 1e-30, 0.1, 7e29):  # the largest coordinate of a bucket, whatever the rounding of 1 / norm
        largest_R = torch.full((3000, 2), norm) * torch.tensor([1.0, -1.0])
        norms_R = bucket_norms(largest_R, None, "linf")
        message_R = encode_levels(largest_R, norms_R, None, book, range(3000))
        assert torch.equal(decoded(message_R, norms_R, 2, None, book), largest_R)


def test_thresholds_never_reach_the_next_level():
    """Not for the largest uniform either, fused multiply-add or not."""
    for book in CODEBOOKS.values():
        made = rounding_to(book)
        for thresholds in filter(None, (made.intervals, made.central)):
            u = torch.tensor(2.0**made.bits - 1)
            for j, (start, width) in enumerate(zip(thresholds.starts, thresholds.widths, strict=True)):
                above = [level for level in np.float32(book) if level > start]
                assert max(thresholds.at(j, u, torch.empty(())), start + width * u) < above[0]
                assert thresholds.at(j, torch.tensor(0.0), torch.empty(())) == start


@pytest.mark.parametrize("book", CODEBOOKS.values(), ids=CODEBOOKS.keys())
def test_zero_buckets_decode_to_zero(book):
    x_R = rows(2, 30)
    x_R[:, 10:20] = 0
    for norm in ("l2", "linf"):
        norms_R = bucket_norms(x_R, 10, norm)
        out_R = decoded(encode_levels(x_R, norms_R, 10, book, [1, 2]), norms_R, 30, 10, book)
        assert norms_R[:, 1].eq(0).all() and out_R[:, 10:20].eq(0).all() and out_R.isfinite().all()


@pytest.mark.parametrize("book", CODEBOOKS.values(), ids=CODEBOOKS.keys())
@pytest.mark.parametrize("size", [None, 100, 8191])
def test_tiles_rows_and_devices_do_not_matter(book, size, monkeypatch):
    """One large tile, several small ones, row by row, and the path that a GPU takes: the same bytes, the same sums."""
    n, keys = 45_000, [7, 8]
    x_R = rows(2, n)
    norms_R = bucket_norms(x_R, size, "l2")
    message_R = encode_levels(x_R, norms_R, size, book, keys)
    total_R = torch.ones(2, n, dtype=torch.float64)
    add_levels_(total_R, message_R, norms_R, size, book)
    monkeypatch.setattr(CPU, "tile", 10 * counter_rng.BLOCK)
    monkeypatch.setattr(DEVICE, "tile", 5 * counter_rng.BLOCK)
    for passes in (CPU, DEVICE):
        assert torch.equal(encode_levels(x_R, norms_R, size, book, keys, passes), message_R)
        again_R = torch.ones(2, n, dtype=torch.float64)
        add_levels_(again_R, message_R, norms_R, size, book, passes)
        assert torch.equal(again_R, total_R)
    for x, norms, key, message in zip(x_R, norms_R, keys, message_R, strict=True):
        assert torch.equal(encode_levels(x[None], norms[None], size, book, [key])[0], message)


@pytest.mark.parametrize("passes", [CPU, DEVICE], ids=["cpu", "device"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_read_as_float32(dtype, passes):
    wide_R = rows(2, 100).to(dtype)
    single_R = wide_R.float()
    for norm in NORMS:
        norms_R = bucket_norms(single_R, 30, norm, passes)
        assert torch.equal(bucket_norms(wide_R, 30, norm, passes), norms_R)
    for book in (even(4), CODEBOOKS["sixteen"]):
        message_R = encode_levels(single_R, norms_R, 30, book, [1, 2], passes)
        assert torch.equal(encode_levels(wide_R, norms_R, 30, book, [1, 2], passes), message_R)
    assert torch.equal(encode_signs(wide_R, passes), encode_signs(single_R, passes))
    for wide, single in zip(*(encode_scaled_signs(x, 30, passes) for x in (wide_R, single_R)), strict=True):
        assert torch.equal(wide, single)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("passes", [CPU, DEVICE], ids=["cpu", "device"])
@pytest.mark.parametrize("size", [None, 60])
def test_sums_are_decodings_added_one_by_one(dtype, passes, size):
    A, n = 6, 203
    for book in (even(3), even(8), even(4), CODEBOOKS["sixteen"], CODEBOOKS["asymmetric"], (1.0, -1.0)):
        x_A = rows(A, n)
        norms_A = bucket_norms(x_A, size, "l2")
        bytes_A = torch.zeros(
            A, packed_codes.code_bytes(n, len(book)) + 3, dtype=torch.uint8
        )  # as cut out of a message
        message_A = bytes_A[:, 2:-1]
        drawn_A = torch.randint(0, len(book), (A, n), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
        message_A[:] = packed_codes.pack_codes(drawn_A, len(book))
        each_A = [decoded(message_A[a : a + 1], norms_A[a : a + 1], n, size, book)[0].to(dtype) for a in range(A)]
        for targets in (1, 2, 6):  # message a goes to row a modulo the number of rows
            total_R = torch.full((targets, n), 0.1, dtype=dtype)
            expected_R = total_R.clone()
            for a, values in enumerate(each_A):
                expected_R[a % targets] += values
            add_levels_(total_R, message_A, norms_A, size, book, passes)
            assert torch.equal(total_R, expected_R)
        flat = torch.full((n,), 0.1, dtype=dtype)
        add_levels_(flat, message_A, norms_A, size, book, passes)
        assert torch.equal(flat, sum(each_A, torch.full((n,), 0.1, dtype=dtype)))


def test_empty_and_strided_inputs():
    for passes in (CPU, DEVICE):
        empty = torch.zeros(2, 0)
        norms_R = bucket_norms(empty, None, "l2", passes)
        assert encode_levels(empty, norms_R, None, even(3), [1, 2], passes).shape == (2, 0)
        assert [t.shape for t in encode_scaled_signs(empty, None, passes)] == [(2, 0), (2, 0)]
        add_levels_(empty, torch.zeros(2, 0, dtype=torch.uint8), norms_R, None, even(3), passes)
        strided_R, whole_R = rows(100, 3).T, rows(100, 3).T.contiguous()
        assert torch.equal(
            bucket_norms(strided_R, 7, "l2", passes),
            bucket_norms(whole_R, 7, "l2", passes),
        )
        norms_R = bucket_norms(whole_R, 7, "l2")
        encoded = [encode_levels(x, norms_R, 7, even(8), [1, 2, 3], passes) for x in (strided_R, whole_R)]
        assert torch.equal(*encoded)
        assert torch.equal(
            encode_signs(strided_R, passes),
            encode_signs(whole_R, passes),
        )


@pytest.mark.parametrize("bad", [(), (-1.0,), (-1.0, 0.5), (-1.0, 0.5, 0.5, 1.0), (0.0, 1.0), even(257)])
def test_bad_codebooks_are_refused(bad):
    with pytest.raises(ValueError, match="ascending order from -1 to 1"):
        encode_levels(torch.ones(1, 4), torch.ones(1, 1), None, bad, [1])


# signs


@pytest.mark.parametrize("passes", [CPU, DEVICE], ids=["cpu", "device"])
@pytest.mark.parametrize("size", [None, 7, 1000])
def test_signs(passes, size, small_tiles):
    for n in (1, 8, 9, 45_001):
        x_R = rows(2, n)
        bits_R = encode_signs(x_R, passes)
        assert bits_R.shape == (2, -(-n // 8))
        assert torch.equal(packed_codes.unpack_codes(bits_R, 2, n).bool(), x_R < 0)  # 0.0 and -0.0 are positive
        again_R, means_R = encode_scaled_signs(x_R, size, passes)
        assert torch.equal(again_R, bits_R)
        for row, means in zip(x_R.double().abs(), means_R, strict=True):
            exact = torch.stack([bucket.mean() for bucket in row.split(size or n)])
            torch.testing.assert_close(means.double(), exact, rtol=2.5e-7, atol=0)
        total_R = torch.ones(2, n)
        add_signs_(total_R, bits_R, means_R, size)
        assert torch.equal(total_R, 1 + torch.where(x_R < 0, -1.0, 1.0) * spread(means_R, n, size))


@pytest.mark.parametrize("passes", [CPU, DEVICE], ids=["cpu", "device"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_without_a_code_are_refused(passes, bad, small_tiles):
    for n, place in ((1, 0), (9, 8), (45_000, 0), (45_000, 44_999), (45_000, 20_000)):
        x_R = rows(3, n)
        x_R[1, place] = bad
        norms_R = bucket_norms(x_R, 100, "l2")
        for encode in (
            lambda: encode_signs(x_R, passes),  # noqa: B023
            lambda: encode_scaled_signs(x_R, 100, passes),  # noqa: B023
            lambda: encode_levels(x_R, norms_R, 100, even(3), [1, 2, 3], passes),  # noqa: B023
        ):
            with pytest.raises(NonFiniteRow) as caught:
                encode()
            assert caught.value.row == 1
