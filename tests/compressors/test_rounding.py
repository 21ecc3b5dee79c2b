"""Random bits, bucket norms, stochastic rounding to levels, signs, and sums of decoded messages."""

import itertools
import math

import numpy as np
import pytest
import torch

from accordion_bench.codecs import coding, packed_codes
from accordion_bench.codecs.bucket import NonFiniteRow
from accordion_bench.codecs.coding import rounding_to
from accordion_bench.compressors.sign import Sign
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.kernels.encode import LANES, block_key
from accordion_bench.tensors.kernels.encode import draw as draw_lanes
from tests.kit.rounding import KERNELS, PATHS, TORCH, bucket_count, random_words, uniforms

NORMS = ("l1", "l2", "linf")
bucket_norms, encode_levels, add_levels_ = KERNELS.bucket_norms, KERNELS.encode_levels, KERNELS.add_levels_
every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())


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


# random bits


def random_bits(key: int, start: int, count: int) -> torch.Tensor:
    """Values start to start + count - 1 of a key's stream: 32 random bits each, int32 [count]."""
    words = random_words(key, start, count)
    return words ^ ((words >> 16) & 0xFFFF)


def test_random_bits_depend_on_key_and_counter_alone():
    n = 3 * keyed_rng.BLOCK + 100
    whole = random_bits(5, 0, n)
    for start, count in (
        (0, 1),
        (1, 7),
        (keyed_rng.BLOCK - 1, 2),
        (keyed_rng.BLOCK, n - keyed_rng.BLOCK),
        (9, 0),
    ):
        assert torch.equal(random_bits(5, start, count), whole[start : start + count])
        assert torch.equal(uniforms(5, start, count), uniforms(5, 0, n)[start : start + count])
    for key in (0, 2**63 - 1, 2**64 - 1):
        assert uniforms(key, 0, 10).max() < 1


def test_kernels_draw_alike_and_leave_the_global_generators():
    before, numpy_before = torch.get_rng_state(), str(np.random.get_state())
    blocks = keyed_rng.blocks_of([[3], [4]], [2], torch.device("cpu"))
    drawn = keyed_rng.integers_of(blocks, 24).view(2, 2, -1)
    for row, key in enumerate([3, 4]):
        for block in range(2):
            own = block_key(keyed_rng.streams_of([key])[0], block)
            assert own == tuple(blocks[row, block].numpy().view(np.uint32))
            out = np.empty(keyed_rng.BLOCK, np.float32)
            draw_lanes(LANES, *own, 24, out)
            assert torch.equal(torch.from_numpy(out), drawn[row, block].float())
    for path in PATHS.values():
        path.encode_levels(torch.ones(1, 9), torch.ones(1, 1), None, even(3), [1])
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
    pairs = [(words[lag:], words[:-lag]) for words in streams for lag in (1, 2, keyed_rng.BLOCK)]
    pairs += [(streams[i], streams[j]) for i in range(4) for j in range(i)]
    for first, second in pairs:
        assert abs(standard_score(np.bincount((first >> 27) * 32 + (second >> 27), minlength=1024))) < 5
    for key in range(4):
        u = uniforms(key, 0, n).double() - 0.5
        assert abs(u.mean()) < 5 * math.sqrt(1 / 12 / n)
        assert abs((u * u).mean() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)


def test_random_bits_of_many_keys_are_uncorrelated():
    keys, n = 200, keyed_rng.BLOCK
    u = torch.stack([uniforms(key, 0, n) for key in range(keys)]).double() - 0.5
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
def test_norms_equal_exact_ones(norm, size):
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
        torch.testing.assert_close(TORCH.bucket_norms(x_R, size, norm), out_R, rtol=2.5e-7, atol=0)


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
            for path in PATHS.values():
                finite = path.bucket_norms(x_R, 4, norm).isfinite()
                assert finite.tolist() == [[True] * 3, [True, False, True]]
    assert bucket_norms(torch.full((1, 100), 3e38), None, "l2").isinf().all()


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
        assert got.tolist() == rounded_slowly(row, norm, book, uniforms(key, 0, n, bits=bits))
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
    close = (-1.0, 0.0, 0.5, 0.5000005, 1.0)  # a few roundings apart
    for book in [*CODEBOOKS.values(), close]:
        made = rounding_to(book)
        u, central = np.float32(2.0**made.bits - 1), made.central.reshape(2, -1)
        for start, width in [*zip(made.starts, made.widths, strict=True), *zip(*central, strict=True)]:
            above = [level for level in np.float32(book) if level > start]
            fused = np.float32(np.float64(start) + np.float64(width) * np.float64(u))  # the product is exact
            assert max(np.float32(width * u) + start, fused) < above[0]
            rounding_u = torch.tensor([0.0, float(u)])
            assert coding._threshold(rounding_u, start, width).tolist() == [start, np.float32(width * u) + start]


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
def test_rows_and_devices_do_not_matter(book, size):
    """Several rows, row by row, and the path that a GPU takes: the same bytes, the same sums."""
    n, keys = 45_000, [7, 8]
    x_R = rows(2, n)
    norms_R = bucket_norms(x_R, size, "l2")
    message_R = encode_levels(x_R, norms_R, size, book, keys)
    total_R = torch.ones(2, n, dtype=torch.float64)
    add_levels_(total_R, message_R, norms_R, size, book)
    assert torch.equal(TORCH.encode_levels(x_R, norms_R, size, book, keys), message_R)
    again_R = torch.ones(2, n, dtype=torch.float64)
    TORCH.add_levels_(again_R, message_R, norms_R, size, book)
    assert torch.equal(again_R, total_R)
    for x, norms, key, message in zip(x_R, norms_R, keys, message_R, strict=True):
        assert torch.equal(encode_levels(x[None], norms[None], size, book, [key])[0], message)


@every_path
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_read_as_float32(dtype, path):
    wide_R = rows(2, 100).to(dtype)
    single_R = wide_R.float()
    for norm in NORMS:
        norms_R = path.bucket_norms(single_R, 30, norm)
        assert torch.equal(path.bucket_norms(wide_R, 30, norm), norms_R)
    for book in (even(4), CODEBOOKS["sixteen"]):
        message_R = path.encode_levels(single_R, norms_R, 30, book, [1, 2])
        assert torch.equal(path.encode_levels(wide_R, norms_R, 30, book, [1, 2]), message_R)
    for method in (Sign(), Sign("l1", "chunk", 30)):
        if path is TORCH or dtype == torch.float64:  # half precision is exchanged in float32
            assert torch.equal(path.encode_sign(method, wide_R), path.encode_sign(method, single_R))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_path
@pytest.mark.parametrize("size", [None, 60])
def test_sums_are_decodings_added_one_by_one(dtype, path, size):
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
            path.add_levels_(total_R, message_A, norms_A, size, book)
            assert torch.equal(total_R, expected_R)
        flat = torch.full((n,), 0.1, dtype=dtype)
        path.add_levels_(flat, message_A, norms_A, size, book)
        assert torch.equal(flat, sum(each_A, torch.full((n,), 0.1, dtype=dtype)))


def test_empty_and_strided_inputs():
    for path in PATHS.values():
        empty = torch.zeros(2, 0)
        norms_R = path.bucket_norms(empty, None, "l2")
        assert path.encode_levels(empty, norms_R, None, even(3), [1, 2]).shape == (2, 0)
        assert path.encode_sign(Sign("l1"), empty).shape == (2, 0)
        path.add_levels_(empty, torch.zeros(2, 0, dtype=torch.uint8), norms_R, None, even(3))
        strided_R, whole_R = rows(100, 3).T, rows(100, 3).T.contiguous()
        assert torch.equal(
            path.bucket_norms(strided_R, 7, "l2"),
            path.bucket_norms(whole_R, 7, "l2"),
        )
        norms_R = bucket_norms(whole_R, 7, "l2")
        encoded = [path.encode_levels(x, norms_R, 7, even(8), [1, 2, 3]) for x in (strided_R, whole_R)]
        assert torch.equal(*encoded)
        assert torch.equal(
            path.encode_sign(Sign("l1"), strided_R),
            path.encode_sign(Sign("l1"), whole_R),
        )


@pytest.mark.parametrize("bad", [(), (-1.0,), (-1.0, 0.5), (-1.0, 0.5, 0.5, 1.0), (0.0, 1.0), even(257)])
def test_bad_codebooks_are_refused(bad):
    with pytest.raises(ValueError, match="ascending order from -1 to 1"):
        rounding_to(bad)


# signs


@every_path
@pytest.mark.parametrize("size", [None, 7, 1000])
def test_signs(path, size):
    for n in (1, 8, 9, 45_001):
        x_R = rows(2, n)
        bits_R = path.encode_sign(Sign(), x_R)
        assert bits_R.shape == (2, -(-n // 8))
        assert torch.equal(packed_codes.unpack_codes(bits_R, 2, n).bool(), x_R < 0)  # 0.0 and -0.0 are positive
        message_R = path.encode_sign(Sign("l1", "chunk", size) if size else Sign("l1"), x_R)
        means_R, again_R = message_R.split([message_R.shape[1] - bits_R.shape[1], bits_R.shape[1]], dim=1)
        means_R = means_R.clone(memory_format=torch.contiguous_format).view(torch.float32)
        assert torch.equal(again_R, bits_R)
        for row, means in zip(x_R.double().abs(), means_R, strict=True):
            exact = torch.stack([bucket.mean() for bucket in row.split(size or n)])
            torch.testing.assert_close(means.double(), exact, rtol=2.5e-7, atol=0)
        total_R = torch.ones(2, n)
        path.add_levels_(total_R, bits_R, means_R, size, (1.0, -1.0))
        assert torch.equal(total_R, 1 + torch.where(x_R < 0, -1.0, 1.0) * spread(means_R, n, size))


@every_path
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_without_a_code_are_refused(path, bad):
    for n, place in ((1, 0), (9, 8), (45_000, 0), (45_000, 44_999), (45_000, 20_000)):
        x_R = rows(3, n)
        x_R[1, place] = bad
        norms_R = path.bucket_norms(x_R, 100, "l2")
        for encode in (
            lambda: path.encode_sign(Sign(), x_R),  # noqa: B023
            lambda: path.encode_sign(Sign("l1", "chunk", 100), x_R),  # noqa: B023
            lambda: path.encode_levels(x_R, norms_R, 100, even(3), [1, 2, 3]),  # noqa: B023
        ):
            with pytest.raises(NonFiniteRow) as caught:
                encode()
            assert caught.value.row == 1
