"""Sums over buckets: of magnitudes, squares, coordinates, negative ones, how many these are, and the largest magnitude.

Accumulated in float64.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors import upload
from accordion_bench.tensors.kernels.on_gpu.launch import TYPES, launch
from accordion_bench.tensors.kernels.on_gpu.table import KEPT, aligned
from accordion_bench.tensors.kernels.table import BUCKET, LONGEST, SIZE, N, Table

L1, L2, LINF, SUM, BELOW, COUNT = (tl.constexpr(kind) for kind in range(6))
KINDS = {"l1": L1, "l2": L2, "linf": LINF, "sum": SUM, "below": BELOW, "count": COUNT}
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


def bucket_norms(addresses: np.ndarray, table: Table, norm: str, like: Tensor) -> Tensor:
    """See `Room.bucket_norms`. One launch; two where a bucket is longer than a piece."""
    there, (W, T), kind = like.device, addresses.shape, KINDS[norm].value
    pieces = pieces_on(table, there)
    parts = torch.empty(W, len(pieces.of), dtype=torch.float64, device=there)
    launch(
        _sum_pieces,
        (len(pieces.of), W),
        there,
        *(upload.upload(torch.from_numpy(addresses), there), T, pieces.of, parts, parts.shape[1]),
        TYPE=TYPES[like.dtype],
        ALIGNED=aligned(addresses, like.dtype) and pieces.aligned,
        KIND=kind,
        WIDTH=pieces.width,
        WHOLE=pieces.most == 1,
    )
    if pieces.most == 1:
        return parts
    out = torch.empty(W, table.buckets, dtype=torch.float64, device=there)
    launch(
        _join_pieces,
        (triton.cdiv(table.buckets, TOGETHER), W),
        there,
        *(pieces.in_bucket, pieces.most, parts, parts.shape[1], out, table.buckets),
        KIND=kind,
        TOGETHER=TOGETHER,
        WIDE=WIDE,
    )
    return out


@triton.jit
def _sum_pieces(  # type: ignore[no-untyped-def]
    addresses, T, pieces, parts, P, TYPE: tl.constexpr, ALIGNED: tl.constexpr, KIND: tl.constexpr, WIDTH: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    p, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t, begin, end = tl.load(pieces + 3 * p), tl.load(pieces + 3 * p + 1), tl.load(pieces + 3 * p + 2)
    x = tl.load(addresses + w * T + t).to(tl.pointer_type(TYPE)) + begin
    x = tl.multiple_of(x, 16 if ALIGNED else 4)
    n = (end - begin).to(tl.int32)
    j = tl.arange(0, WIDTH)
    full = n // WIDTH * WIDTH
    total = tl.zeros([WIDTH], tl.int32 if KIND == LINF else tl.float64)
    for start in range(0, full, WIDTH):
        total = _with(total, tl.load(x + start + j), KIND)
    if full < n:
        total = _with(total, tl.load(x + full + j, mask=full + j < n, other=0), KIND)
    if KIND == LINF:
        part = tl.max(total, axis=0).to(tl.float32, bitcast=True).to(tl.float64)
    else:
        part = tl.sum(total, axis=0)
    if KIND == L2 and WHOLE:
        part = tl.sqrt(part)
    tl.store(parts + w * P + p, part)


@triton.jit
def _with(total, some, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """A number of each lane, and one more coordinate."""
    narrow = some.to(tl.float32)
    if KIND == LINF:
        # by the bits of float32, whose order is that of magnitudes, and in which NaN is above infinity
        return tl.maximum(total, narrow.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    elif KIND == L1:
        return total + tl.abs(narrow.to(tl.float64))
    elif KIND == L2:
        return total + narrow.to(tl.float64) * narrow.to(tl.float64)
    elif KIND == SUM:
        return total + narrow.to(tl.float64)
    elif KIND == BELOW:
        return total + tl.minimum(narrow.to(tl.float64), 0.0)
    else:
        return total + (narrow < 0).to(tl.float64)


@triton.jit
def _join_pieces(  # type: ignore[no-untyped-def]
    in_bucket, most, parts, P, out, M, KIND: tl.constexpr, TOGETHER: tl.constexpr, WIDE: tl.constexpr
):
    w = tl.program_id(1).to(tl.int64)
    b = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    first = tl.load(in_bucket + 2 * b, mask=b < M, other=0)[:, None]
    count = tl.load(in_bucket + 2 * b + 1, mask=b < M, other=0)[:, None]
    k = tl.arange(0, WIDE)[None, :]
    total = tl.zeros([TOGETHER, WIDE], tl.int64 if KIND == LINF else tl.float64)
    for start in range(0, most, WIDE):
        part = tl.load(parts + w * P + first + start + k, mask=start + k < count, other=0)
        if KIND == LINF:
            total = tl.maximum(total, part.to(tl.int64, bitcast=True))  # by its bits, too
        else:
            total += part
    if KIND == LINF:
        joined = tl.max(total, axis=1).to(tl.float64, bitcast=True)
    else:
        joined = tl.sum(total, axis=1)
    tl.store(out + w * M + b, tl.sqrt(joined) if KIND == L2 else joined, mask=b < M)
