"""Quantisation to levels and to signs: bucket norms, stochastic rounding, packed codes, and sums of decoded messages.

A row of coordinates is cut into buckets of `bucket_size` consecutive ones (None: the whole row is one bucket); the last
bucket may be shorter and has a norm of its own. Everything goes tile by tile, so that a tile stays in the processor's
cache between the passes over it and a gradient is read from memory once for its norms and once for its codes.

With r = x / norm clamped to [-1, 1], u uniform in [0, 1) and levels a <= r <= c, the code is that of c with probability
(r - a) / (c - a), else that of a: E[level] = r, Var[level] = (c - r)(r - a). Three ways to the same distribution:

    even grid         floor(r s + s + u), s = (K - 1) / 2
    symmetric levels  the magnitude: how many j have |r| > l_j + u (l_{j+1} - l_j); the sign is that of r. Without
                      a zero level it is + where r > l_1 (2 u - 1), which draws it between -l_1 and l_1, nowhere else
    any levels        how many j have r > L_j + u (L_{j+1} - L_j)

For one u these thresholds ascend with j, so their count is a code. A coordinate on a level keeps that level. Norm 0
stands for a bucket of zeros: whatever its codes, it decodes to zeros.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from accordion_bench.compressors import packed_codes
from accordion_bench.tensors.counter_rng import BLOCK, block_keys, fill_bits_

NORMS = ("l1", "l2", "linf")

# coordinates at a time: whole blocks of random bits and, for any code, whole bytes (40 codes)
_TILE_ON_CPU = 80 * BLOCK
_TILE_ON_DEVICE = 1000 * BLOCK

# up to so many thresholds, comparing with each in turn is faster than a binary search
_COUNTED = 64


class NonFiniteInput(ValueError):
    """NaN, infinity or a norm beyond float32 in something to be encoded.

    Args:
        row: index of the first row that holds such a value.
    """

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} holds NaN or infinity, or its norm exceeds float32")
        self.row = row


def bucket_count(n: int, bucket_size: int | None) -> int:
    """m, the number of buckets of n coordinates."""
    return -(-n // (bucket_size or max(n, 1)))


def bucket_norms(x_R: Tensor, bucket_size: int | None, norm: str) -> Tensor:
    """The norm of each bucket of rows [R, N], accumulated in float64.

    Args:
        norm: `l1` (sum of magnitudes), `l2`, `linf` (largest magnitude).

    Returns:
        float32 [R, m]; NaN or infinity where the bucket holds such a value or its norm exceeds float32.
    """
    return _bucket_norms(x_R, bucket_size, norm, x_R.device.type != "cpu")


def encode_levels(
    x_R: Tensor, norms_R: Tensor, bucket_size: int | None, levels: tuple[float, ...], keys: Sequence[int]
) -> Tensor:
    """Codes of rows [R, N], rounded to norm x level at random without bias.

    Args:
        norms_R: what each bucket is divided by, float32 [R, m].
        levels: K ascending numbers from -1 to 1, at most 256.
        keys: one per row; coordinate i of a row depends on the row's key and on i alone, whatever the chunks.

    Returns:
        Packed codes, uint8 [R, codes.code_bytes(N, K)].

    Raises:
        NonFiniteInput: a norm is not finite.

    Source: Alistarh et al. 2017 (arXiv 1610.02132) for even grids; Faghri et al. 2020 (arXiv 2010.12460) for any.
    """
    return _encode_levels(x_R, norms_R, bucket_size, levels, keys, x_R.device.type != "cpu")


def add_levels_(
    total: Tensor, message_A: Tensor, norms_A: Tensor, bucket_size: int | None, levels: tuple[float, ...]
) -> None:
    """total += sum over a, in order, of norm_a x level[code_a], each product and each sum rounded once.

    Args:
        total: [N], or [R, N]: then message a goes to row a mod R. float32 or float64.
        message_A: packed codes, uint8 [A, codes.code_bytes(N, K)].
        norms_A: float32 [A, m]; negative ones subtract, norms over A give a mean.
    """
    _add_levels_(total, message_A, norms_A, bucket_size, levels, total.device.type != "cpu")


def encode_signs(x_R: Tensor) -> Tensor:
    """Signs of rows [R, N] as bits, 1 = negative (0.0 and -0.0 are positive): uint8 [R, ceil(N / 8)].

    Raises:
        NonFiniteInput: a row holds NaN or infinity.
    """
    return _encode_signs(x_R, x_R.device.type != "cpu")


def encode_scaled_signs(x_R: Tensor, bucket_size: int | None) -> tuple[Tensor, Tensor]:
    """Signs of rows [R, N] as bits and the mean magnitude of each bucket, its l1 norm over its size, in one pass.

    Returns:
        (uint8 [R, ceil(N / 8)], float32 [R, m]).

    Raises:
        NonFiniteInput: a row holds NaN or infinity.
    """
    return _encode_scaled_signs(x_R, bucket_size, x_R.device.type != "cpu")


def add_signs_(total: Tensor, message_A: Tensor, scale_A: Tensor, bucket_size: int | None) -> None:
    """total += sum over a, in order, of scale_a x (-1 where the bit is set, else +1); arguments as `add_levels_`."""
    _add_levels_(total, message_A, scale_A, bucket_size, (1.0, -1.0), total.device.type != "cpu")


# tiles and buckets


def _tiles(rows: int, n: int, on_device: bool) -> Iterator[tuple[slice, slice]]:
    """Cut [rows, n] into tiles: several whole rows, or a part of one row."""
    size = _TILE_ON_DEVICE if on_device else _TILE_ON_CPU
    at_once = max(1, size // max(n, 1))
    for row in range(0, rows if n else 0, at_once):
        for column in range(0, n, size):
            yield slice(row, min(row + at_once, rows)), slice(column, min(column + size, n))


class _Buffers:
    """Scratch memory for the largest tile of [rows, n], one tensor per type, cut to the shape of each tile."""

    def __init__(self, rows: int, n: int, on_device: bool, device: torch.device, *dtypes: torch.dtype) -> None:
        room = min(rows * max(n, 1), _TILE_ON_DEVICE if on_device else _TILE_ON_CPU)
        self.flat = [torch.empty(room, dtype=dtype, device=device) for dtype in dtypes]
        self.cut: dict[torch.Size, list[Tensor]] = {}

    def __call__(self, shape: torch.Size) -> list[Tensor]:
        if shape not in self.cut:
            self.cut[shape] = [flat[: shape.numel()].view(shape) for flat in self.flat]
        return self.cut[shape]


@functools.lru_cache(maxsize=4096)
def _pieces(start: int, stop: int, bucket_size: int) -> list[tuple[slice, slice, int]]:
    """Cut columns at bucket borders: (columns counted from `start`, their buckets, columns per bucket).

    A piece has one bucket or a part of one, or several whole buckets.
    """
    first, last = -(-start // bucket_size) * bucket_size, stop // bucket_size * bucket_size
    borders = sorted({start, min(first, stop), max(last, start), stop})
    pieces = []
    for left, right in itertools.pairwise(borders):
        count = max(1, (right - left) // bucket_size)
        bucket = left // bucket_size
        pieces.append((slice(left - start, right - start), slice(bucket, bucket + count), (right - left) // count))
    return pieces


def _bucket_views(tile: Tensor, per_bucket_R: Tensor, row: slice, start: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Tile [rows, columns] and one number per bucket in pairs [rows, buckets, columns], [rows, buckets, 1]."""
    return [
        (tile[:, columns].view(len(tile), -1, width), per_bucket_R[row, buckets, None])
        for columns, buckets, width in _pieces(start, start + tile.shape[1], size)
    ]


def _multiply_buckets(x: Tensor, factors_R: Tensor, row: slice, start: int, size: int, out: Tensor) -> Tensor:
    """out = x [rows, columns] times the factor of each bucket; the columns begin with `start`."""
    for columns, buckets, width in _pieces(start, start + x.shape[1], size):
        parts = (whole[:, columns].view(len(x), -1, width) for whole in (x, out))
        torch.mul(next(parts), factors_R[row, buckets, None], out=next(parts))
    return out


def _refuse_non_finite(values_R: Tensor) -> None:
    finite_R = values_R.isfinite()
    if not finite_R.all():
        raise NonFiniteInput(int((~finite_R).any(1).nonzero()[0]))


# norms


def _bucket_norms(x_R: Tensor, bucket_size: int | None, norm: str, on_device: bool) -> Tensor:
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm}")
    rows, n = x_R.shape
    sums_R = torch.zeros(rows, bucket_count(n, bucket_size), dtype=torch.float64, device=x_R.device)
    buffers = _Buffers(rows, n, on_device, x_R.device, torch.float32, torch.float64)
    for row, column in _tiles(rows, n, on_device):
        x = x_R[row, column]
        single, double = buffers(x.shape)
        if norm == "l2":
            terms = double.copy_(x if x.dtype == torch.float32 else single.copy_(x))
        else:
            terms = _magnitudes(x, single)
        for part, sums in _bucket_views(terms, sums_R, row, column.start, bucket_size or n):
            if norm == "l2":
                sums += _sum_of_squares(part, on_device)[..., None]
            elif norm == "l1":
                sums += _sum(part, on_device)
            else:
                torch.maximum(sums, part.amax(-1, keepdim=True), out=sums)
    return (sums_R.sqrt_() if norm == "l2" else sums_R).float()


def _magnitudes(x: Tensor, out: Tensor) -> Tensor:
    return torch.abs(x, out=out) if x.dtype == torch.float32 else out.copy_(x).abs_()


def _sum_of_squares(part: Tensor, on_device: bool) -> Tensor:
    if on_device:
        return torch.linalg.vecdot(part, part)
    return torch.from_numpy(np.vecdot(part.numpy(), part.numpy()))


def _sum(part: Tensor, on_device: bool) -> Tensor:
    # on a CPU pairwise in float32 within a tile: twice as fast, and off by no more than the result's own rounding
    return part.sum(-1, keepdim=True, dtype=torch.float64 if on_device else torch.float32)


# levels


@dataclass(frozen=True)
class _Thresholds:
    """The thresholds l_j + v width_j of the intervals between adjacent levels.

    v = u 2^bits is an integer below 2^bits, so width_j = (l_{j+1} - l_j) 2^-bits. It is lowered, where rounding asks
    for it, until l_j + v width_j < l_{j+1} for every v: who sits on a level keeps it.
    """

    starts: Tensor
    widths: Tensor

    @classmethod
    def between(cls, levels: Sequence[float], bits: int) -> "_Thresholds":
        ends, largest = np.array(levels, np.float32), np.float32(2**bits - 1)
        starts, widths = ends[:-1], (ends[1:] - ends[:-1]) * np.float32(2.0**-bits)
        while True:
            fused = (starts + largest * widths.astype(np.float64)).astype(np.float32)  # the product is exact
            wide = np.maximum(fused, starts + largest * widths) >= ends[1:]
            if not wide.any():
                return cls(torch.from_numpy(starts.copy()), torch.from_numpy(widths))
            widths = np.where(wide, np.nextafter(widths, np.float32(0)), widths)

    def at(self, j: int, v: Tensor, out: Tensor) -> Tensor:
        """Threshold j: one fused multiply-add."""
        return torch.add(self.starts[j], v, alpha=float(self.widths[j]), out=out)

    def around(self, r: Tensor, v: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """The index of the interval that holds each r, int32, and its threshold."""
        j = torch.bucketize(r, self.starts[1:].to(r.device), out_int32=True)
        starts, widths = (
            per_interval.to(r.device).index_select(0, j.view(-1)).view(r.shape)
            for per_interval in (self.starts, self.widths)
        )
        return j, torch.mul(v, widths, out=out).add_(starts)


@dataclass(frozen=True)
class _Codebook:
    """How to round to K levels.

    kind: `even`, `symmetric` or `any`.
    scale: what coordinates are normalised to, s for an even grid, else 1.
    bits: of u; K - 1 + u is then exact in float32.
    intervals: between the levels; `symmetric`: between the positive ones, and zero where it is a level.
    central: from -l_1 to l_1 where zero is none, its threshold decides on the sign.
    """

    K: int
    kind: str
    scale: float
    bits: int
    intervals: _Thresholds
    central: _Thresholds | None = None


@functools.lru_cache(maxsize=256)
def _codebook(levels: tuple[float, ...]) -> _Codebook:
    K, singles = len(levels), np.array(levels, np.float32)
    if not 2 <= K <= 256 or levels[0] != -1 or levels[-1] != 1 or not (singles[1:] > singles[:-1]).all():
        raise ValueError(f"levels must be 2 to 256 numbers in ascending order from -1 to 1, got {levels}")
    bits = 24 - (K - 1).bit_length()
    if np.abs(np.linspace(-1, 1, K) - levels).max() <= 2.0**-25:  # half the spacing of float32 numbers below 1
        return _Codebook(K, "even", (K - 1) / 2, bits, _Thresholds.between(levels, bits))
    if (singles == -singles[::-1]).all():
        central = None if K % 2 else _Thresholds.between(levels[K // 2 - 1 : K // 2 + 1], bits)
        return _Codebook(K, "symmetric", 1, bits, _Thresholds.between(levels[K // 2 :], bits), central)
    return _Codebook(K, "any", 1, bits, _Thresholds.between(levels, bits))


class _Tile(NamedTuple):
    """Scratch of one tile: normalised coordinates, u 2^bits, thresholds; codes, comparisons, signs."""

    r: Tensor
    v: Tensor
    t: Tensor
    code: Tensor
    above: Tensor
    sign: Tensor


_TILE_TYPES = (*[torch.float32] * 3, *[torch.uint8] * 3)


def _encode_levels(
    x_R: Tensor,
    norms_R: Tensor,
    bucket_size: int | None,
    levels: tuple[float, ...],
    keys: Sequence[int],
    on_device: bool,
) -> Tensor:
    rows, n = x_R.shape
    book = _codebook(levels)
    _refuse_non_finite(norms_R)
    factors_R = _factors(norms_R, book.scale)
    blocks_R = block_keys(keys, 0, -(-n // BLOCK), x_R.device)
    message_R = torch.empty(rows, packed_codes.code_bytes(n, book.K), dtype=torch.uint8, device=x_R.device)
    buffers = _Buffers(rows, n, on_device, x_R.device, *_TILE_TYPES)
    for row, column in _tiles(rows, n, on_device):
        x = x_R[row, column]
        tile = _Tile(*buffers(x.shape))
        _draw_(tile, blocks_R[row, column.start // BLOCK :], book.bits, on_device)
        x = x if x.dtype == torch.float32 else tile.r.copy_(x)
        _multiply_buckets(x, factors_R, row, column.start, bucket_size or n, out=tile.r)
        _round_(tile, book, on_device)
        _store(message_R, row, column, tile.code, book.K, on_device)
    return message_R


def _factors(norms_R: Tensor, scale: float) -> Tensor:
    """scale / norm, rounded up where else a coordinate as large as its norm would end below `scale`, its level."""
    exact, above = (torch.tensor(s, device=norms_R.device) for s in (scale, np.nextafter(np.float32(scale), np.inf)))
    factors_R = torch.div(exact, norms_R)
    factors_R = torch.where(norms_R * factors_R < exact, torch.div(above, norms_R), factors_R)
    return factors_R.clamp_max_(torch.finfo(torch.float32).max)  # finite for norm 0: 0 times this is 0


def _store(message_R: Tensor, row: slice, column: slice, code: Tensor, K: int, on_device: bool) -> None:
    place = row, slice(packed_codes.code_bytes(column.start, K), packed_codes.code_bytes(column.stop, K))
    if on_device:
        message_R[place] = packed_codes._pack_on_device(code, K)
    else:
        message_R.numpy()[place] = packed_codes._pack_on_cpu(code.numpy(), K)


def _draw_(tile: _Tile, blocks_R: Tensor, bits: int, on_device: bool) -> None:
    """v = u 2^bits: the leading bits of the random words, as integers."""
    words = fill_bits_(tile.t.view(torch.int32), blocks_R)
    if on_device:
        words.bitwise_right_shift_(32 - bits).bitwise_and_((1 << bits) - 1)
    else:
        unsigned = words.numpy().view(np.uint32)
        np.right_shift(unsigned, np.uint32(32 - bits), out=unsigned)
    tile.v.copy_(words)


def _round_(tile: _Tile, book: _Codebook, on_device: bool) -> None:
    """Codes of normalised coordinates; overwrites them."""
    if book.kind == "even":
        tile.r.add_(book.scale).clamp_(0, 2 * book.scale).add_(tile.v, alpha=2.0**-book.bits)
        if on_device:
            tile.code.copy_(tile.r)
        else:  # torch converts to uint8 one by one
            np.copyto(tile.code.numpy(), tile.r.numpy(), casting="unsafe")
    elif book.kind == "any":
        _count_(tile, book.intervals, on_device)
    else:
        _greater_(tile.sign, tile.r, book.central.at(0, tile.v, tile.t) if book.central else _ZERO, on_device)
        tile.r.abs_()
        _count_(tile, book.intervals, on_device)
        # code + K // 2 where positive, else K - 1 less that, as ~(code + K // 2) + K modulo 256
        mask = tile.sign.sub_(1)
        tile.code.add_(book.K // 2).bitwise_xor_(mask).add_(mask.bitwise_and_(book.K % 256))


_ZERO = torch.zeros(())


def _count_(tile: _Tile, intervals: _Thresholds, on_device: bool) -> None:
    """code = how many thresholds lie below r."""
    count = len(intervals.starts)
    if count > 2 and not on_device:  # a threshold at or above the largest r counts nothing: it need not be computed
        count = max(1, int(np.searchsorted(intervals.starts.numpy(), tile.r.numpy().max())))
    if count > _COUNTED:
        j, threshold = intervals.around(tile.r, tile.v, tile.t)
        tile.code.copy_(j)
        _greater_(tile.above, tile.r, threshold, on_device)
        tile.code.add_(tile.above)
        return
    _greater_(tile.code, tile.r, intervals.at(0, tile.v, tile.t), on_device)
    for k in range(1, count):
        _greater_(tile.above, tile.r, intervals.at(k, tile.v, tile.t), on_device)
        tile.code.add_(tile.above)


def _greater_(out: Tensor, r: Tensor, threshold: Tensor, on_device: bool) -> None:
    """out = r > threshold, as 0 and 1."""
    if on_device:
        torch.gt(r, threshold, out=out.view(torch.bool))
    else:  # torch compares one by one
        np.greater(r.numpy(), threshold.numpy(), out=out.numpy().view(np.bool_))


def _add_levels_(
    total: Tensor,
    message_A: Tensor,
    norms_A: Tensor,
    bucket_size: int | None,
    levels: tuple[float, ...],
    on_device: bool,
) -> None:
    total_R = total[None] if total.ndim == 1 else total
    rows, n = total_R.shape
    K, size = len(levels), bucket_size or n
    for row, column in _tiles(rows, n, on_device):
        sums = total_R[row, column]
        place = slice(packed_codes.code_bytes(column.start, K), packed_codes.code_bytes(column.stop, K))
        for first in range(0, len(message_A), rows):
            senders = slice(first + row.start, first + row.stop)
            packed, count = message_A[senders, place], sums.shape[1]
            if on_device:
                values = packed_codes._look_up_on_device(packed, levels, count)
            elif len(packed) == 1 and column.start // size == (column.stop - 1) // size:
                # one norm for all: the table is multiplied, not the many values
                sums += packed_codes.look_up(packed, levels, count, norms_A[senders, column.start // size].item())
                continue
            else:
                values = packed_codes.look_up(packed, levels, count)
            _add_products_(sums, values, norms_A, senders, column.start, size, set(levels) == {-1.0, 1.0})


def _add_products_(
    sums: Tensor, values: Tensor, norms_A: Tensor, senders: slice, start: int, size: int, signs: bool
) -> None:
    """sums += values [senders, columns] times the norm of their bucket, rounded after the product and after the sum."""
    for columns, buckets, width in _pieces(start, start + values.shape[1], size):
        part, out = (whole[:, columns].view(len(values), -1, width) for whole in (values, sums))
        norms = norms_A[senders, buckets, None]
        if signs and out.dtype == norms.dtype:  # their products are exact: one pass gives the same
            out.addcmul_(part, norms)
        else:
            out.add_(part.mul_(norms))


# signs


def _encode_signs(x_R: Tensor, on_device: bool) -> Tensor:
    rows, n = x_R.shape
    message_R = torch.empty(rows, packed_codes.code_bytes(n, 2), dtype=torch.uint8, device=x_R.device)
    buffers = _Buffers(rows, n, on_device, x_R.device, torch.float32, torch.uint8)
    if on_device:
        _refuse_non_finite(x_R)
    for row, column in _tiles(rows, n, on_device):
        x = x_R[row, column]
        single, negative = buffers(x.shape)
        x = x if x.dtype == torch.float32 else single.copy_(x)
        if not (on_device or _all_finite(x)):
            raise NonFiniteInput(row.start + int((~x.isfinite()).any(1).nonzero()[0]))
        _negative_(negative, x, on_device)
        _store(message_R, row, column, negative, 2, on_device)
    return message_R


def _all_finite(x: Tensor) -> bool:
    """A product with zeros is NaN where a factor is not finite: the cheapest pass that tells."""
    with np.errstate(invalid="ignore"):
        return not np.isnan(np.vecdot(x.numpy(), _zeros(x.shape[1]))).any()


@functools.lru_cache(maxsize=8)
def _zeros(n: int) -> np.ndarray:
    return np.zeros(n, np.float32)


def _negative_(out: Tensor, x: Tensor, on_device: bool) -> None:
    """out = x < 0, as 0 and 1."""
    if on_device:
        torch.lt(x, 0, out=out.view(torch.bool))
    else:
        np.less(x.numpy(), 0, out=out.numpy().view(np.bool_))


def _encode_scaled_signs(x_R: Tensor, bucket_size: int | None, on_device: bool) -> tuple[Tensor, Tensor]:
    rows, n = x_R.shape
    size, m = bucket_size or n, bucket_count(n, bucket_size)
    message_R = torch.empty(rows, packed_codes.code_bytes(n, 2), dtype=torch.uint8, device=x_R.device)
    sums_R = torch.zeros(rows, m, dtype=torch.float64, device=x_R.device)
    buffers = _Buffers(rows, n, on_device, x_R.device, torch.float32, torch.uint8)
    for row, column in _tiles(rows, n, on_device):
        x = x_R[row, column]
        single, negative = buffers(x.shape)
        x = x if x.dtype == torch.float32 else single.copy_(x)
        _negative_(negative, x, on_device)
        _store(message_R, row, column, negative, 2, on_device)
        for part, sums in _bucket_views(torch.abs(x, out=single), sums_R, row, column.start, size):
            sums += _sum(part, on_device)
    lengths = torch.full((m,), size, device=x_R.device)
    lengths[m - 1 :] = n - (m - 1) * size
    means_R = (sums_R / lengths).float()
    _refuse_non_finite(means_R)
    return message_R, means_R
