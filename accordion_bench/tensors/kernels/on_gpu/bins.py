"""Selection in bins of consecutive coordinates on a GPU, see `Engine.select_in_bins`.

A program processes bins of one tensor with about 4,096 coordinates, each padded to a power of two. Tensors of equal
padded bins share launches.

Tensor suffixes: W workers, T tensors, P programs of all tensors.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors.kernels.dense_kernels import Coordinates
from accordion_bench.tensors.kernels.on_gpu.launch import TYPES, launch, parts_of
from accordion_bench.tensors.upload import upload

WIDEST = 4096  # most coordinates of a bin
NARROWEST = 64  # smallest padded size of a bin
COLUMNS = tl.constexpr(3)
N, SIZE, FIRST = (tl.constexpr(column) for column in range(COLUMNS.value))
"""Columns of a tensor: coordinates; coordinates per bin; programs of previous tensors. A last row has the totals."""


def send_lifted(
    residuals_W: Sequence[Tensor], news_W: Sequence[Tensor], sizes: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    """See `Engine.select_in_bins`; for bins of at most WIDEST coordinates. One launch, and two per padded size."""
    grown, news, like = Coordinates(residuals_W), Coordinates.of(news_W), residuals_W[0]
    (W, T), there = grown.addresses.shape, like.device
    sent_W = [torch.empty(x_W.shape, dtype=x_W.dtype, device=there) for x_W in residuals_W]
    n, size = np.array([x_W.shape[1] for x_W in residuals_W], np.int64), np.array(sizes, np.int64)
    width = np.array([max(NARROWEST, triton.next_power_of_2(one)) for one in sizes], np.int64)
    together = WIDEST // width
    counts = -(-n // (size * together))
    parts = parts_of(counts, 1)  # the tensor, and the number of the program's row
    P = len(parts)
    rows = np.stack([np.append(one, 0) for one in (n, size)] + [np.append(0, counts.cumsum())], axis=1)
    where = [x.addresses.ravel() for x in (grown, news, Coordinates(sent_W))]
    widths = sorted(set(width.tolist()))
    of_width = [parts[width[parts[:, 0]] == one].ravel() for one in widths]
    flat = upload(torch.from_numpy(np.concatenate([*where, rows.ravel(), *of_width])), there)
    addresses, rows_on, *parts_on = flat.split([3 * W * T, rows.size, *map(len, of_width)])
    totals, scales_W = torch.empty(W, P, dtype=torch.float64, device=there), torch.empty(W, T, device=there)
    each = [{"TYPE": TYPES[like.dtype], "WIDE": one, "BINS": WIDEST // one} for one in widths]
    for own, constants in zip(parts_on, each, strict=True):
        launch(_sum_largest, (len(own) // 2, W), there, addresses, T, rows_on, own, totals, P, **constants)
    launch(_scale, (T, W), there, rows_on, totals, P, scales_W, T)
    for own, constants in zip(parts_on, each, strict=True):
        launch(_send, (len(own) // 2, W), there, addresses, T, rows_on, own, scales_W, **constants)
    return sent_W, scales_W


@triton.jit
def _bins(addresses, T, rows, parts, TYPE: tl.constexpr, WIDE: tl.constexpr, BINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tensor and number of a program; its bins [BINS, WIDE]: addresses, which exist, residuals and gradients."""
    p, w, W = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    t, number = tl.load(parts + 2 * p), tl.load(parts + 2 * p + 1)
    row = rows + t * COLUMNS
    size, begin = tl.load(row + SIZE).to(tl.int32), number * BINS * tl.load(row + SIZE)
    k = tl.arange(0, WIDE)[None, :]
    j = tl.arange(0, BINS)[:, None] * size + k
    exists = (k < size) & (begin + j < tl.load(row + N))
    where = begin.to(tl.int64) + j
    at = tl.load(addresses + w * T + t).to(tl.pointer_type(TYPE)) + where
    news = tl.load(addresses + (W + w) * T + t).to(tl.pointer_type(TYPE)) + where
    x, newest = tl.load(at, mask=exists, other=0), tl.load(news, mask=exists, other=0)
    return w, t, number, row, where, exists, at, x, newest


@triton.jit
def _largest(x, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Largest magnitude of each bin by its bits, with NaN above infinity."""
    if tl.float32 == TYPE:
        most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        return most.to(tl.float32, bitcast=True)
    else:
        most = tl.max(x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF, axis=1)
        return most.to(tl.float64, bitcast=True)


@triton.jit
def _sum_largest(  # type: ignore[no-untyped-def]
    addresses, T, rows, parts, totals, P, TYPE: tl.constexpr, WIDE: tl.constexpr, BINS: tl.constexpr
):
    w, _, number, row, _, exists, at, x, newest = _bins(addresses, T, rows, parts, TYPE, WIDE, BINS)
    x = x + newest
    tl.store(at, x, mask=exists)
    total = tl.sum(_largest(x, TYPE).to(tl.float64), axis=0)  # bins that do not exist add 0
    tl.store(totals + w * P + tl.load(row + FIRST) + number, total)


@triton.jit
def _scale(rows, totals, P, scales, T):  # type: ignore[no-untyped-def]
    t, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, i = rows + t * COLUMNS, tl.arange(0, 256)
    n, first, end = tl.load(row + N), tl.load(row + FIRST), tl.load(row + COLUMNS + FIRST)
    total = tl.zeros([256], tl.float64)
    for start in range(first, end, 256):
        total += tl.load(totals + w * P + start + i, mask=start + i < end, other=0)
    size = tl.load(row + SIZE)
    bins = tl.maximum((n + size - 1) // size, 1)
    tl.store(scales + w * T + t, (tl.sum(total, axis=0) / bins.to(tl.float64)).to(tl.float32))


@triton.jit
def _send(  # type: ignore[no-untyped-def]
    addresses, T, rows, parts, scales, TYPE: tl.constexpr, WIDE: tl.constexpr, BINS: tl.constexpr
):
    w, t, _, _, where, exists, at, x, newest = _bins(addresses, T, rows, parts, TYPE, WIDE, BINS)
    W = tl.num_programs(1)
    select_in_bins = tl.abs(x + newest) >= _largest(x, TYPE)[:, None]
    scale = tl.load(scales + w * T + t).to(TYPE)
    sign = (select_in_bins & (x > 0)).to(TYPE) - (select_in_bins & (x < 0)).to(TYPE)
    out = tl.load(addresses + (2 * W + w) * T + t).to(tl.pointer_type(TYPE)) + where
    tl.store(out, sign * scale, mask=exists)
    tl.store(at, x - sign * scale, mask=exists)
