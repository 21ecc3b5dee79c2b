"""Selection in bins of consecutive coordinates on a CPU, see `Engine.select_in_bins`.

A bin belongs to the tile that contains its first coordinate.

Tensor suffixes: W workers, T tensors, R rows.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.kernels.compiled import array_at, compiled, f64, i64
from accordion_bench.tensors.kernels.table import over_tiles
from accordion_bench.tensors.kernels.top import ADDRESS, MAGNITUDE, SIZE, TILE, N, Rows, limits


def send_lifted(
    residuals_W: Sequence[Tensor], news_W: Sequence[Tensor], sizes: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    """See `Engine.select_in_bins`; for tensors of one dtype with contiguous rows."""
    sent_W = [torch.empty_like(x_W, memory_format=torch.contiguous_format) for x_W in residuals_W]
    grown, news, sent = Rows(residuals_W), Rows(news_W), Rows(sent_W)
    like, size = limits(grown.dtype), np.tile(np.asarray(sizes, np.int64), len(residuals_W[0]))
    numbers, largest = np.empty(0, grown.dtype), np.zeros(grown.tiles)
    over_tiles(_add_largest, grown.tiles, grown.table, news.table, like, numbers, size, largest)
    n = grown.table[:-1, N]
    totals = np.add.reduceat(np.append(largest, 0), grown.table[:-1, TILE]) * (n > 0)
    scales = (totals / np.maximum(-(-n // size), 1)).astype(np.float32)
    over_tiles(_send, grown.tiles, grown.table, news.table, sent.table, like, numbers, size, scales)
    return sent_W, torch.from_numpy(scales).view(-1, len(residuals_W))


@compiled
def _largest(keys, magnitude, box, numbers):  # type: ignore[no-untyped-def]
    """Return the largest magnitude by its bits, with NaN above infinity."""
    most = i64(0)
    for i in range(keys.size):
        most = max(most, keys[i] & magnitude)
    box[0] = most
    return numbers[0]


@compiled
def _add_largest(rows, news, limits, like, size, out, first, last):  # type: ignore[no-untyped-def]
    """Add the newest gradients to the residuals; sum the largest magnitudes of the bins of each tile."""
    box = np.empty(1, limits.dtype)
    number = box.view(like.dtype)
    for row in range(rows.shape[0] - 1):
        n, width = rows[row, N], size[row]
        keys, grown = array_at(rows[row, ADDRESS], n, limits), array_at(rows[row, ADDRESS], n, like)
        newest = array_at(news[row, ADDRESS], n, like)
        for tile in range(max(first, rows[row, TILE]), min(last, rows[row + 1, TILE])):
            start = (tile - rows[row, TILE]) * SIZE
            total = f64(0)
            for at in range((start + width - 1) // width * width, min(start + SIZE, n), width):
                for i in range(at, min(at + width, n)):
                    grown[i] += newest[i]
                total += f64(_largest(keys[at : at + width], limits[MAGNITUDE], box, number))
            out[tile] = total


@compiled
def _send(rows, news, sent, limits, like, size, scales, first, last):  # type: ignore[no-untyped-def]
    box = np.empty(1, limits.dtype)
    number = box.view(like.dtype)
    for row in range(rows.shape[0] - 1):
        n, width, scale = rows[row, N], size[row], like.dtype.type(scales[row])
        keys, grown = array_at(rows[row, ADDRESS], n, limits), array_at(rows[row, ADDRESS], n, like)
        newest, out = array_at(news[row, ADDRESS], n, like), array_at(sent[row, ADDRESS], n, like)
        for tile in range(max(first, rows[row, TILE]), min(last, rows[row + 1, TILE])):
            start = (tile - rows[row, TILE]) * SIZE
            for at in range((start + width - 1) // width * width, min(start + SIZE, n), width):
                largest = _largest(keys[at : at + width], limits[MAGNITUDE], box, number)
                g, x, y = grown[at : at + width], newest[at : at + width], out[at : at + width]
                for i in range(g.size):
                    select_in_bins = abs(g[i] + x[i]) >= largest
                    y[i] = scale * (i64(select_in_bins & (g[i] > 0)) - i64(select_in_bins & (g[i] < 0)))
                    g[i] -= y[i]
