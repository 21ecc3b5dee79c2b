"""Where coordinates, scales and codes of several tensors lie: what a kernel is told of them.

Tensor suffixes: T tensors, M buckets of all of them, W local workers.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from accordion_bench.tensors.counter_rng import BLOCK

N, SIZE, BUCKET, TILE, HEADER, CODES, MORE = range(7)  # columns of a table
"""Coordinates; coordinates of a bucket; buckets and tiles before the tensor's first; where in a message its scales, its
codes and its second stream of codes begin, in bytes."""


class Table:
    """Several tensors, cut into tiles and buckets.

    A tile is what one thread does at once: whole blocks of random numbers, whole bytes of codes.

    Args:
        lengths: coordinates of each tensor.
        sizes: coordinates of its buckets; the last one may be shorter.
        tile: coordinates of a tile.
        headers, codes, more: where its parts begin in a message.

    Attributes:
        rows: int64 [T + 1, 7], see above; the last one tells the numbers of all buckets and tiles.
        buckets: M.
        tiles: how many, of one worker.
        tile: coordinates of a tile.
        entries: coordinates of each bucket, float64 [M].
    """

    def __init__(
        self,
        lengths: Sequence[int],
        sizes: Sequence[int],
        tile: int,
        headers: Sequence[int],
        codes: Sequence[int],
        more: Sequence[int],
    ) -> None:
        assert tile % BLOCK == 0
        n, size = np.array(lengths, np.int64), np.array(sizes, np.int64)
        buckets, tiles = -(-n // size), -(-n // tile)
        self.rows = np.zeros((len(n) + 1, 7), np.int64)
        self.rows[:-1, N], self.rows[:-1, SIZE] = n, size
        self.rows[1:, BUCKET], self.rows[1:, TILE] = buckets.cumsum(), tiles.cumsum()
        for column, starts in ((HEADER, headers), (CODES, codes), (MORE, more)):
            self.rows[:-1, column] = starts
        self.buckets, self.tiles, self.tile = int(buckets.sum()), int(tiles.sum()), tile
        self.entries = np.repeat(size, buckets).astype(np.float64)
        filled = buckets > 0
        self.entries[(buckets.cumsum() - 1)[filled]] = (n - (buckets - 1) * size)[filled]


def addresses(rows_W: Sequence[Tensor]) -> np.ndarray:
    """Where each worker's part [N] of tensors [W, N] lies, int64 [W, T]; parts must be contiguous."""
    steps = np.arange(len(rows_W[0]))[:, None]
    starts = np.array([x_W.data_ptr() for x_W in rows_W], np.int64)
    return starts + steps * np.array([x_W.stride(0) * x_W.element_size() for x_W in rows_W], np.int64)
