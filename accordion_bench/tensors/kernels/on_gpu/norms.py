"""Norms of buckets on a GPU: sums of magnitudes, squares, coordinates and negative ones, counts, largest magnitudes.

Sums are accumulated in float64. Numbers derived from norms equal those of `codecs.coding` bit for bit.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors import upload
from accordion_bench.tensors.kernels.dense_kernels import NORMS, BlockRule, Coordinates
from accordion_bench.tensors.kernels.on_gpu.launch import KEPT, TYPES, launch, parts_of
from accordion_bench.tensors.kernels.on_gpu.residual_inputs import NOT, rate_of, row_at, told, with_residuals
from accordion_bench.tensors.kernels.table import BUCKET, LONGEST, SIZE, N, Table

KINDS = tl.constexpr(len(NORMS))
L1, L2, LINF, SUM, BELOW, COUNT = (tl.constexpr(kind) for kind in range(len(NORMS)))
WIDEST = 2048  # coordinates per iteration
LARGEST = tl.constexpr(float(np.finfo(np.float32).max))
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
ROUNDING = tl.constexpr(1e-15)  # see `codecs.coding.ROUNDING`
OF_FACTORS = 1024  # blocks of a program that computes factors
TOGETHER, WIDE = 4, 256  # buckets per program that joins pieces, and pieces per iteration


class Pieces(NamedTuple):
    """Buckets, and parts of long buckets, on a GPU.

    of: int64 [pieces, 3]: tensor, first coordinate, and end of each piece.
    in_bucket: int64 [M, 3]: first piece, number of pieces and number of coordinates of each bucket.
    most: largest number of pieces of a bucket.
    width: coordinates per iteration, a power of two.
    aligned: whether all pieces are aligned to 16 bytes if their tensors are.
    """

    of: Tensor
    in_bucket: Tensor
    most: int
    width: int
    aligned: bool


@functools.lru_cache(maxsize=KEPT)
def pieces_on(table: Table, device: torch.device) -> Pieces:
    """Return the pieces of the buckets of a table; cached."""
    n, size = table.rows[:-1, N], table.rows[:-1, SIZE]
    t, within = parts_of(np.diff(table.rows[:, BUCKET]), 1).T
    begin = within * size[t]
    end = np.minimum(begin + size[t], n[t])
    counts = -(-(end - begin) // LONGEST)
    b, within = parts_of(counts, LONGEST).T
    start = begin[b] + within
    stop = np.minimum(start + LONGEST, end[b])
    longest = int((stop - start).max(initial=1))
    return Pieces(
        upload.table(torch.from_numpy(np.stack([t[b], start, stop], axis=1)), device),
        upload.table(torch.from_numpy(np.stack([counts.cumsum() - counts, counts, end - begin], axis=1)), device),
        int(counts.max(initial=1)),
        min(WIDEST, max(32, triton.next_power_of_2(longest))),
        not (start % 4).any(),
    )


def bucket_norms(x: Coordinates, table: Table, kinds: Sequence[str]) -> list[Tensor]:
    """See `DenseKernels.bucket_norms`. One launch with one read; two launches if a bucket is longer than a piece."""
    which = sorted(map(NORMS.index, kinds))
    out = _summed(x, table, which, None)
    return [out[which.index(NORMS.index(kind))] for kind in kinds]


def block_numbers(x: Coordinates, table: Table, rule: BlockRule) -> list[Tensor]:
    """Return the numbers that a rule derives from norms, float32 [W, M] each. Launches as for `bucket_norms`."""
    return list(_summed(x, table, sorted(map(NORMS.index, rule.norms)), rule))


def _summed(x: Coordinates, table: Table, which: Sequence[int], rule: BlockRule | None) -> Tensor:
    """Return norms, float64 [kinds, W, M], or the numbers of a rule, float32 [numbers, W, M]."""
    there, (W, T) = x.like.device, x.addresses.shape
    pieces, mask = pieces_on(table, there), sum(1 << kind for kind in which)
    whole, finish = pieces.most == 1, constants_of(rule)
    numbers = (len(which) if rule is None else 1 + (rule.kind == "means" or bool(rule.factor)), W, table.buckets)
    out = torch.empty(numbers, dtype=torch.float64 if rule is None else torch.float32, device=there)
    parts = out if whole else torch.empty(len(which), W, len(pieces.of), dtype=torch.float64, device=there)
    top = 1.0 if rule is None else float(rule.top)
    given, constants = told(x)
    constants["ALIGNED"] = constants["ALIGNED"] and pieces.aligned
    del constants["MASKED"]
    launch(
        _sum_pieces,
        (len(pieces.of), W),
        there,
        *(*given, T, pieces.of, parts, parts.shape[2], top, above(top)),
        TYPE=TYPES[x.like.dtype],
        **constants,
        MASK=mask,
        WIDTH=pieces.width,
        WHOLE=whole,
        **(finish if whole else constants_of(None)),
    )
    if not whole:
        launch(
            _join_pieces,
            (triton.cdiv(table.buckets, TOGETHER), W),
            there,
            *(pieces.in_bucket, pieces.most, parts, parts.shape[2], out, table.buckets, top, above(top)),
            MASK=mask,
            TOGETHER=TOGETHER,
            WIDE=WIDE,
            **finish,
        )
    return out


def factors(scales: Tensor, rule: BlockRule) -> Tensor:
    """Return the factors of coordinates, with the shape of the scales. One launch."""
    scales = scales.contiguous()
    out = torch.empty_like(scales)
    grid, top = (triton.cdiv(scales.numel(), OF_FACTORS),), float(rule.top)
    args = (scales, scales.numel(), top, above(top), out)
    launch(_factors, grid, scales.device, *args, FACTOR=rule.factor, TOGETHER=OF_FACTORS)
    return out


def above(number: float) -> float:
    """Return the next larger float32."""
    return float(np.nextafter(np.float32(number), np.float32(np.inf)))


def constants_of(rule: BlockRule | None) -> dict[str, Any]:
    """Return the constants of kernels for a rule."""
    if rule is None:
        return {"RULE": "", "OVER": "", "MOST": 1.0, "FACTOR": "", "CLIP": 0.0}
    return {"RULE": rule.kind, "OVER": rule.over, "MOST": rule.largest, "FACTOR": rule.factor, "CLIP": rule.clip}


@triton.constexpr_function
def chosen(MASK, kind):  # type: ignore[no-untyped-def]
    """Whether a mask contains a kind."""
    return bool(MASK >> kind & 1)


@triton.constexpr_function
def in_integers(kind):  # type: ignore[no-untyped-def]
    """Whether a kind is accumulated in integers: counts, or bits of magnitudes."""
    return kind in (LINF.value, COUNT.value)


@triton.constexpr_function
def number_of(MASK, kind):  # type: ignore[no-untyped-def]
    """Number of kinds of a mask before this one."""
    return (MASK & ((1 << kind) - 1)).bit_count()


@triton.constexpr_function
def only(MASK):  # type: ignore[no-untyped-def]
    """Kind of a mask with a single kind."""
    return MASK.bit_length() - 1


@triton.jit
def _sum_pieces(  # type: ignore[no-untyped-def]
    addresses, weight, decay, momentum, T, pieces, parts, P, top, next_above,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, FED: tl.constexpr, DECAYED: tl.constexpr, LED: tl.constexpr,
    MASK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr, RULE: tl.constexpr, OVER: tl.constexpr,
    MOST: tl.constexpr, FACTOR: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    p, w, W = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    t, begin, end = tl.load(pieces + 3 * p), tl.load(pieces + 3 * p + 1), tl.load(pieces + 3 * p + 2)
    x = row_at(addresses, w, T, t, TYPE, ALIGNED) + begin
    e, u = x, x
    if FED != NOT:
        e = row_at(addresses, W + w, T, t, TYPE, ALIGNED) + begin
    if LED:
        u = row_at(addresses, 2 * W + 2, T, t, TYPE, ALIGNED) + begin
    if ALIGNED:
        x, e, u = tl.multiple_of(x, 16), tl.multiple_of(e, 16), tl.multiple_of(u, 16)
    rate = rate_of(addresses, W, T, t, TYPE, FED)
    n = (end - begin).to(tl.int32)
    j = tl.arange(0, WIDTH)
    full = n // WIDTH * WIDTH
    totals = _nothing(MASK, WIDTH)
    for start in range(0, full, WIDTH):
        own = tl.load(x + start + j)
        if FED != NOT:
            kept = tl.load(e + start + j)
            led = tl.load(u + start + j) if LED else kept
            own = with_residuals(own, kept, led, weight, decay, momentum, rate, FED, DECAYED, LED)
        totals = _with(totals, own, MASK)
    if full < n:
        own = tl.load(x + full + j, mask=full + j < n, other=0)
        if FED != NOT:
            kept = tl.load(e + full + j, mask=full + j < n, other=0)
            led = tl.load(u + full + j, mask=full + j < n, other=0) if LED else kept
            own = with_residuals(own, kept, led, weight, decay, momentum, rate, FED, DECAYED, LED)
        totals = _with(totals, own, MASK)
    sums, one = (), tl.arange(0, 1)
    for kind in tl.static_range(KINDS):
        sums += (tl.zeros([1], tl.float64) + _joined(totals[kind], MASK, kind, WHOLE),)  # type: ignore[assignment]
    out, stride = parts + w * P + p + one, W * P
    _store(out, stride, one == 0, sums, (n + one).to(tl.float64), top, next_above, MASK, RULE, OVER, MOST, FACTOR, CLIP)


@triton.jit
def _joined(lanes, MASK: tl.constexpr, kind: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reduction over the lanes of a piece."""
    if not chosen(MASK, kind):
        return 0.0
    elif kind == LINF:
        return tl.max(lanes, axis=0).to(tl.float32, bitcast=True).to(tl.float64)
    elif kind == L2 and WHOLE:
        return tl.sqrt(tl.sum(lanes, axis=0))
    else:
        return tl.sum(lanes.to(tl.float64), axis=0)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    out, stride, exists, sums, n, top, next_above, MASK: tl.constexpr, RULE: tl.constexpr, OVER: tl.constexpr,
    MOST: tl.constexpr, FACTOR: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Store sums of blocks of n coordinates, or the numbers that a rule derives from them."""
    if RULE == "":
        for kind in tl.static_range(KINDS):
            if chosen(MASK, kind):
                tl.store(out + number_of(MASK, kind) * stride, sums[kind], mask=exists)
    elif RULE == "means":
        middle, half = means_of(sums, n)
        tl.store(out, middle, mask=exists)
        tl.store(out + stride, half, mask=exists)
    elif RULE == "largest":
        tl.store(out, clipped_of(sums, n, CLIP), mask=exists)
    else:
        scale = scale_of(sums[only(MASK)], n, OVER, MOST)
        tl.store(out, scale, mask=exists)
        if FACTOR != "":
            tl.store(out + stride, factor_of(scale, top, next_above, FACTOR), mask=exists)


@triton.jit
def _nothing(MASK: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros per lane for each kind; a single unused zero for kinds outside of the mask."""
    totals = ()
    for kind in tl.static_range(KINDS):
        totals += (_zeros(WIDTH if chosen(MASK, kind) else 1, kind),)  # type: ignore[assignment]
    return totals


@triton.jit
def _zeros(LANES: tl.constexpr, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.zeros([LANES], tl.int32 if in_integers(kind) else tl.float64)


@triton.jit
def _with(totals, some, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Totals with one more coordinate per lane."""
    narrow = some.to(tl.float32)
    wide = narrow.to(tl.float64)
    more = ()
    for kind in tl.static_range(KINDS):
        if not chosen(MASK, kind):
            more += (totals[kind],)  # type: ignore[assignment]
        elif kind == LINF:
            # by the bits of float32: their order is that of magnitudes, with NaN above infinity
            magnitude = narrow.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            more += (tl.maximum(totals[kind], magnitude),)  # type: ignore[assignment]
        elif kind == L1:
            more += (totals[kind] + tl.abs(wide),)  # type: ignore[assignment]
        elif kind == L2:
            more += (tl.fma(wide, wide, totals[kind]),)  # type: ignore[assignment] # squares are exact in float64
        elif kind == SUM:
            more += (totals[kind] + wide,)  # type: ignore[assignment]
        elif kind == BELOW:
            more += (totals[kind] + tl.minimum(wide, 0.0),)  # type: ignore[assignment]
        else:
            more += (totals[kind] + (narrow < 0).to(tl.int32),)  # type: ignore[assignment]
    return more


@triton.jit
def _join_pieces(  # type: ignore[no-untyped-def]
    in_bucket, most, parts, P, out, M, top, next_above, MASK: tl.constexpr, TOGETHER: tl.constexpr, WIDE: tl.constexpr,
    RULE: tl.constexpr, OVER: tl.constexpr, MOST: tl.constexpr, FACTOR: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    w, W = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    b = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    first = tl.load(in_bucket + 3 * b, mask=b < M, other=0)[:, None]
    count = tl.load(in_bucket + 3 * b + 1, mask=b < M, other=0)[:, None]
    n = tl.load(in_bucket + 3 * b + 2, mask=b < M, other=1).to(tl.float64)
    k = tl.arange(0, WIDE)[None, :]
    sums = ()
    for kind in tl.static_range(KINDS):
        own = parts + (number_of(MASK, kind) * W + w) * P + first
        sums += (_of_pieces(own, count, most, k, MASK, kind, TOGETHER, WIDE),)  # type: ignore[assignment]
    _store(out + w * M + b, W * M, b < M, sums, n, top, next_above, MASK, RULE, OVER, MOST, FACTOR, CLIP)


@triton.jit
def _of_pieces(  # type: ignore[no-untyped-def]
    own, count, most, k, MASK: tl.constexpr, kind: tl.constexpr, TOGETHER: tl.constexpr, WIDE: tl.constexpr
):
    """Reduction over the pieces of each bucket of a program."""
    if not chosen(MASK, kind):
        return tl.zeros([TOGETHER], tl.float64)
    else:
        total = tl.zeros([TOGETHER, WIDE], tl.int64 if kind == LINF else tl.float64)
        for start in range(0, most, WIDE):
            part = tl.load(own + start + k, mask=start + k < count, other=0)
            if kind == LINF:
                total = tl.maximum(total, part.to(tl.int64, bitcast=True))  # by bits as well
            else:
                total += part
        if kind == LINF:
            return tl.max(total, axis=1).to(tl.float64, bitcast=True)
        elif kind == L2:
            return tl.sqrt(tl.sum(total, axis=1))
        else:
            return tl.sum(total, axis=1)


# ---- numbers derived from norms


@triton.jit
def scale_of(norm, n, OVER: tl.constexpr, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales, float32, of norms of blocks of n coordinates.

    Norms are float64, or float32 if they are divided by the largest code: the division in float64, rounded to float32,
    has the same bits, because float64 has more than twice the digits.
    """
    if OVER == "n":
        norm = norm / n
    elif OVER == "root n":
        norm = norm / tl.sqrt(n)
    elif OVER == "largest" and MOST != 1:
        norm = tl.div_rn(norm, tl.full(norm.shape, MOST, tl.float32)) if norm.dtype == tl.float32 else norm / MOST
    scale = norm.to(tl.float32)
    if OVER == "largest":
        scale = tl.where(scale < SMALLEST_NORMAL, 0.0, scale)  # NaN stays
    return scale


@triton.jit
def factor_of(scale, top, next_above, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Factors of the coordinates of blocks."""
    if FACTOR == "inverse":
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        return tl.where(inverse < float("inf"), inverse, 0.0)
    else:
        tl.static_assert(FACTOR == "levels")
        factor = tl.div_rn(top, scale)
        factor = tl.where(scale * factor < top, tl.div_rn(next_above, scale), factor)
        return tl.where(factor > LARGEST, LARGEST, factor)  # NaN stays


@triton.jit
def at_least(x, least):  # type: ignore[no-untyped-def]
    """Maximum that propagates NaN."""
    return tl.where(x < least, least, x)


@triton.jit
def means_of(sums, n):  # type: ignore[no-untyped-def]
    """Middle and half of blocks of n coordinates, from their sums."""
    high = at_least(sums[SUM] - sums[BELOW], 0.0) / at_least(n - sums[COUNT], 1.0)
    low = sums[BELOW] / at_least(sums[COUNT], 1.0)
    return ((high + low) / 2).to(tl.float32), ((high - low) / 2).to(tl.float32)


@triton.jit
def clipped_of(sums, n, CLIP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Largest magnitudes of blocks of n coordinates, clipped at CLIP standard deviations, from their sums."""
    square, constant = sums[L2] * sums[L2], sums[SUM] * sums[SUM] / n
    most = CLIP * tl.sqrt(at_least(square - constant, 0.0) / at_least(n - 1, 1.0))
    largest = tl.where(sums[LINF] > most, most, sums[LINF])
    return tl.where(constant < (1 - ROUNDING * (n + 9)) * square, largest, sums[LINF]).to(tl.float32)


@triton.jit
def _factors(scales, n, top, next_above, out, FACTOR: tl.constexpr, TOGETHER: tl.constexpr):  # type: ignore[no-untyped-def]
    b = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    scale = tl.load(scales + b, mask=b < n, other=1)
    tl.store(out + b, factor_of(scale, top, next_above, FACTOR), mask=b < n)
