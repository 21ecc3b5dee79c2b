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
from accordion_bench.tensors.kernels.on_gpu.table import KEPT
from accordion_bench.tensors.kernels.table import BUCKET, LONGEST, SIZE, N, Table

L1, L2, LINF, SUM, BELOW, COUNT = (tl.constexpr(kind) for kind in range(6))
KINDS = {"l1": L1, "l2": L2, "linf": LINF, "sum": SUM, "below": BELOW, "count": COUNT}
WIDEST = 2048  # coordinates at a time
TOGETHER = 128  # buckets of a program that joins pieces


class Pieces(NamedTuple):
    """Buckets, and parts of long ones, on a GPU.

    of: int64 [pieces, 3]: the tensor, and the piece's first coordinate and the one behind its last.
    in_bucket: int64 [M, 2]: the first piece of each bucket, and how many it has.
    most: pieces of a bucket.
    width: coordinates at a time, a power of two.
    """

    of: Tensor
    in_bucket: Tensor
    most: int
    width: int


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
    )
    return out


@triton.jit
def _sum_pieces(  # type: ignore[no-untyped-def]
    addresses, T, pieces, parts, P, TYPE: tl.constexpr, KIND: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr
):
    p, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t, begin, end = tl.load(pieces + 3 * p), tl.load(pieces + 3 * p + 1), tl.load(pieces + 3 * p + 2)
    x = tl.load(addresses + w * T + t).to(tl.pointer_type(TYPE)) + begin
    n = (end - begin).to(tl.int32)
    j = tl.arange(0, WIDTH)
    if KIND == LINF:
        most = tl.zeros([WIDTH], tl.int32)
        for start in range(0, n, WIDTH):
            some = tl.load(x + start + j, mask=start + j < n, other=0).to(tl.float32)
            # by the bits of float32, whose order is that of magnitudes, and in which NaN is above infinity
            most = tl.maximum(most, some.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        part = tl.max(most, axis=0).to(tl.float32, bitcast=True).to(tl.float64)
    else:
        total = tl.zeros([WIDTH], tl.float64)
        for start in range(0, n, WIDTH):
            some = tl.load(x + start + j, mask=start + j < n, other=0).to(tl.float32).to(tl.float64)
            if KIND == L1:
                total += tl.abs(some)
            elif KIND == L2:
                total += some * some
            elif KIND == SUM:
                total += some
            elif KIND == BELOW:
                total += tl.minimum(some, 0.0)
            else:
                total += (some < 0).to(tl.float64)
        part = tl.sum(total, axis=0)
        if KIND == L2 and WHOLE:
            part = tl.sqrt(part)
    tl.store(parts + w * P + p, part)


@triton.jit
def _join_pieces(  # type: ignore[no-untyped-def]
    in_bucket, most, parts, P, out, M, KIND: tl.constexpr, TOGETHER: tl.constexpr
):
    w = tl.program_id(1).to(tl.int64)
    b = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    first = tl.load(in_bucket + 2 * b, mask=b < M, other=0)
    count = tl.load(in_bucket + 2 * b + 1, mask=b < M, other=0)
    total = tl.zeros([TOGETHER], tl.float64)
    for k in range(0, most):
        part = tl.load(parts + w * P + first + k, mask=k < count, other=0)
        if KIND == LINF:
            total = tl.where(part <= total, total, tl.where(total == total, part, total))  # NaN stays
        else:
            total += part
    tl.store(out + w * M + b, tl.sqrt(total) if KIND == L2 else total, mask=b < M)
