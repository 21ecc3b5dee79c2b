"""Sums over buckets: of magnitudes, squares, coordinates, negative ones, how many these are, and the largest magnitude.

Accumulated in float64.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors import upload
from accordion_bench.tensors.kernels.dense_kernels import NORMS, Coordinates
from accordion_bench.tensors.kernels.on_gpu.fed import NOT, fed_by, rate_of, row_at, told
from accordion_bench.tensors.kernels.on_gpu.launch import TYPES, launch
from accordion_bench.tensors.kernels.on_gpu.table import KEPT
from accordion_bench.tensors.kernels.table import BUCKET, LONGEST, SIZE, N, Table

KINDS = tl.constexpr(len(NORMS))
L1, L2, LINF, SUM, BELOW, COUNT = (tl.constexpr(kind) for kind in range(len(NORMS)))
WIDEST = 2048  # coordinates at a time
TOGETHER, WIDE = 4, 256  # buckets of a program that joins pieces, and pieces at a time


class Pieces(NamedTuple):
    """Buckets, and parts of long ones, on a GPU.

    of: int64 [pieces, 3]: the tensor, and the piece's first coordinate and the one behind its last.
    in_bucket: int64 [M, 2]: the first piece of each bucket, and how many it has.
    most: pieces of a bucket.
    width: coordinates at a time, a power of two.
    aligned: whether each begins where 16 bytes can be read at once, if its tensor does.
    """

    of: Tensor
    in_bucket: Tensor
    most: int
    width: int
    aligned: bool


@functools.lru_cache(maxsize=KEPT)
def pieces_on(table: Table, device: torch.device) -> Pieces:
    """The pieces of a table's buckets."""
    n, size = table.rows[:-1, N], table.rows[:-1, SIZE]
    buckets = np.diff(table.rows[:, BUCKET])
    t = np.repeat(np.arange(len(n)), buckets)
    begin = _numbers_within(buckets) * size[t]
    end = np.minimum(begin + size[t], n[t])
    counts = -(-(end - begin) // LONGEST)
    b = np.repeat(np.arange(len(counts)), counts)
    start = begin[b] + _numbers_within(counts) * LONGEST
    stop = np.minimum(start + LONGEST, end[b])
    longest = int((stop - start).max(initial=1))
    return Pieces(
        upload.table(torch.from_numpy(np.stack([t[b], start, stop], axis=1)), device),
        upload.table(torch.from_numpy(np.stack([counts.cumsum() - counts, counts], axis=1)), device),
        int(counts.max(initial=1)),
        min(WIDEST, max(32, triton.next_power_of_2(longest))),
        not (start % 4).any(),
    )


def _numbers_within(counts: np.ndarray) -> np.ndarray:
    """0, 1, ... for each of the counts, one behind the other."""
    return np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)


def bucket_norms(x: Coordinates, table: Table, kinds: Sequence[str]) -> list[Tensor]:
    """See `DenseKernels.bucket_norms`. One launch, which reads once; two where a bucket is longer than a piece."""
    there, (W, T) = x.like.device, x.addresses.shape
    pieces, which = pieces_on(table, there), sorted(map(NORMS.index, kinds))
    mask = sum(1 << kind for kind in which)
    parts = torch.empty(len(which), W, len(pieces.of), dtype=torch.float64, device=there)
    given, constants = told(x, there)
    constants["ALIGNED"] = constants["ALIGNED"] and pieces.aligned
    launch(
        _sum_pieces,
        (len(pieces.of), W),
        there,
        *(*given, T, pieces.of, parts, parts.shape[2]),
        TYPE=TYPES[x.like.dtype],
        **constants,
        MASK=mask,
        WIDTH=pieces.width,
        WHOLE=pieces.most == 1,
    )
    out = parts
    if pieces.most > 1:
        out = torch.empty(len(which), W, table.buckets, dtype=torch.float64, device=there)
        launch(
            _join_pieces,
            (triton.cdiv(table.buckets, TOGETHER), W),
            there,
            *(pieces.in_bucket, pieces.most, parts, parts.shape[2], out, table.buckets),
            MASK=mask,
            TOGETHER=TOGETHER,
            WIDE=WIDE,
        )
    return [out[which.index(NORMS.index(kind))] for kind in kinds]


@triton.constexpr_function
def chosen(MASK, kind):  # type: ignore[no-untyped-def]
    """Whether a kind is among those of a mask."""
    return bool(MASK >> kind & 1)


@triton.constexpr_function
def in_integers(kind):  # type: ignore[no-untyped-def]
    """Whether what is added up are integers, or the bits of magnitudes."""
    return kind in (LINF.value, COUNT.value)


@triton.constexpr_function
def number_of(MASK, kind):  # type: ignore[no-untyped-def]
    """How many of a mask's kinds come before this one."""
    return (MASK & ((1 << kind) - 1)).bit_count()


@triton.jit
def _sum_pieces(  # type: ignore[no-untyped-def]
    addresses, weight, decay, T, pieces, parts, P, TYPE: tl.constexpr, ALIGNED: tl.constexpr, FED: tl.constexpr,
    DECAYED: tl.constexpr, MASKED: tl.constexpr, MASK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    p, w, W = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    t, begin, end = tl.load(pieces + 3 * p), tl.load(pieces + 3 * p + 1), tl.load(pieces + 3 * p + 2)
    x = row_at(addresses, w, T, t, TYPE, ALIGNED) + begin
    e = x
    if FED != NOT:
        e = row_at(addresses, W + w, T, t, TYPE, ALIGNED) + begin
    if ALIGNED:
        x, e = tl.multiple_of(x, 16), tl.multiple_of(e, 16)
    rate = rate_of(addresses, W, T, t, TYPE, FED)
    n = (end - begin).to(tl.int32)
    j = tl.arange(0, WIDTH)
    full = n // WIDTH * WIDTH
    totals = _nothing(MASK, WIDTH)
    for start in range(0, full, WIDTH):
        own = tl.load(x + start + j)
        if FED != NOT:
            own = fed_by(own, tl.load(e + start + j), weight, decay, rate, FED, DECAYED)
        totals = _with(totals, own, MASK)
    if full < n:
        own = tl.load(x + full + j, mask=full + j < n, other=0)
        if FED != NOT:
            own = fed_by(own, tl.load(e + full + j, mask=full + j < n, other=0), weight, decay, rate, FED, DECAYED)
        totals = _with(totals, own, MASK)
    for kind in tl.static_range(KINDS):
        if chosen(MASK, kind):
            if kind == LINF:
                part = tl.max(totals[kind], axis=0).to(tl.float32, bitcast=True).to(tl.float64)
            else:
                part = tl.sum(totals[kind].to(tl.float64), axis=0)
            if kind == L2 and WHOLE:
                part = tl.sqrt(part)
            tl.store(parts + (number_of(MASK, kind) * W + w) * P + p, part)


@triton.jit
def _nothing(MASK: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """A number of each lane for each kind; of kinds that are not asked for one that is never used."""
    totals = ()
    for kind in tl.static_range(KINDS):
        totals += (_zeros(WIDTH if chosen(MASK, kind) else 1, kind),)  # type: ignore[assignment]
    return totals


@triton.jit
def _zeros(LANES: tl.constexpr, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.zeros([LANES], tl.int32 if in_integers(kind) else tl.float64)


@triton.jit
def _with(totals, some, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same, and one more coordinate of each lane."""
    narrow = some.to(tl.float32)
    wide = narrow.to(tl.float64)
    more = ()
    for kind in tl.static_range(KINDS):
        if not chosen(MASK, kind):
            more += (totals[kind],)  # type: ignore[assignment]
        elif kind == LINF:
            # by the bits of float32, whose order is that of magnitudes, and in which NaN is above infinity
            magnitude = narrow.to(tl.int32, bitcast=True) & 0x7FFFFFFF
            more += (tl.maximum(totals[kind], magnitude),)  # type: ignore[assignment]
        elif kind == L1:
            more += (totals[kind] + tl.abs(wide),)  # type: ignore[assignment]
        elif kind == L2:
            more += (totals[kind] + wide * wide,)  # type: ignore[assignment]
        elif kind == SUM:
            more += (totals[kind] + wide,)  # type: ignore[assignment]
        elif kind == BELOW:
            more += (totals[kind] + tl.minimum(wide, 0.0),)  # type: ignore[assignment]
        else:
            more += (totals[kind] + (narrow < 0).to(tl.int32),)  # type: ignore[assignment]
    return more


@triton.jit
def _join_pieces(  # type: ignore[no-untyped-def]
    in_bucket, most, parts, P, out, M, MASK: tl.constexpr, TOGETHER: tl.constexpr, WIDE: tl.constexpr
):
    w, W = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    b = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    first = tl.load(in_bucket + 2 * b, mask=b < M, other=0)[:, None]
    count = tl.load(in_bucket + 2 * b + 1, mask=b < M, other=0)[:, None]
    k = tl.arange(0, WIDE)[None, :]
    for kind in tl.static_range(KINDS):
        if chosen(MASK, kind):
            own = parts + (number_of(MASK, kind) * W + w) * P + first
            total = tl.zeros([TOGETHER, WIDE], tl.int64 if kind == LINF else tl.float64)
            for start in range(0, most, WIDE):
                part = tl.load(own + start + k, mask=start + k < count, other=0)
                if kind == LINF:
                    total = tl.maximum(total, part.to(tl.int64, bitcast=True))  # by its bits, too
                else:
                    total += part
            if kind == LINF:
                joined = tl.max(total, axis=1).to(tl.float64, bitcast=True)
            else:
                joined = tl.sum(total, axis=1)
            joined = tl.sqrt(joined) if kind == L2 else joined
            tl.store(out + (number_of(MASK, kind) * W + w) * M + b, joined, mask=b < M)
