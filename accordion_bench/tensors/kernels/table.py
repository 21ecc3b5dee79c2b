"""Where coordinates, scales and codes of several tensors lie: what a kernel is told of them.

Tensor suffixes: T tensors, M buckets of all of them, W local workers.
"""

import functools
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from accordion_bench.tensors.counter_rng import BLOCK

N, SIZE, BUCKET, TILE, PIECE, HEADER, CODES, MORE = range(8)
"""Columns of a table: coordinates; coordinates of a bucket; buckets, tiles and pieces before the tensor's first; where
in a message its scales, its codes and its second stream of codes begin, in bytes."""

LONGEST = 1 << 16  # coordinates of a piece of a long bucket
ONE, DIFFERENT = 0, -1  # in the place of the size of all buckets: tensors are whole ones; sizes differ


class Table:
    """Several tensors, cut into tiles and into buckets.

    A tile is what one thread encodes or decodes at once: whole blocks of random numbers, whole bytes of codes. A piece
    is a bucket, or a part of a long one, of which one thread makes a sum.

    Args:
        lengths: coordinates of each tensor.
        sizes: coordinates of its buckets; the last one may be shorter.
        tile: coordinates of a tile.
        headers, streams: where its scales and each stream of its codes begin in a message, in bytes.

    Attributes:
        rows: int64 [T + 1, 8], see above; the last one tells how many buckets, tiles and pieces there are.
        buckets, tiles, pieces: how many there are.
        tile: coordinates of a tile.
        entries: coordinates of each bucket, float64 [M].
    """

    def __init__(
        self,
        lengths: Sequence[int],
        sizes: Sequence[int],
        tile: int,
        headers: Sequence[int],
        streams: Sequence[Sequence[int]],
    ) -> None:
        assert tile % BLOCK == 0
        n, size = np.array(lengths, np.int64), np.array(sizes, np.int64)
        buckets = -(-n // size)
        self.rows = np.zeros((len(n) + 1, 8), np.int64)
        columns = {N: n, SIZE: size, HEADER: headers} | dict(zip((CODES, MORE), streams, strict=False))
        for column, values in columns.items():
            self.rows[:-1, column] = np.asarray(values, np.int64)
        counts = {BUCKET: buckets, TILE: -(-n // tile), PIECE: buckets * -(-size // LONGEST)}
        for column, values in counts.items():
            self.rows[1:, column] = values.cumsum()
        self.buckets, self.tiles, self.pieces = (int(self.rows[-1, column]) for column in (BUCKET, TILE, PIECE))
        self.tile = tile
        self.entries = np.repeat(size, buckets).astype(np.float64)
        filled = buckets > 0
        self.entries[(buckets.cumsum() - 1)[filled]] = (n - (buckets - 1) * size)[filled]


@functools.lru_cache(maxsize=256)
def bucket_size(table: Table) -> int:
    """Coordinates of a bucket, where all tensors that are longer than one have the same; else ONE or DIFFERENT."""
    n, size = table.rows[:-1, N], table.rows[:-1, SIZE]
    several = set(size[n > size].tolist())
    if not several:
        return ONE
    (first, *others) = several
    return DIFFERENT if others or (n[n <= size] > first).any() or first >= 1 << 30 else first


def contiguous(x_W: Tensor) -> Tensor:
    """[W, N] with coordinates of a row side by side."""
    return x_W if x_W.stride(1) == 1 else x_W.contiguous()


def addresses(rows_W: Sequence[Tensor]) -> np.ndarray:
    """Where each worker's part [N] of tensors [W, N] lies, int64 [W, T]; parts must be contiguous."""
    starts = np.array([x_W.data_ptr() for x_W in rows_W], np.int64)
    if len(rows_W[0]) == 1:
        return starts[None]
    steps = np.array([x_W.stride(0) * x_W.element_size() for x_W in rows_W], np.int64)
    return starts + np.arange(len(rows_W[0]))[:, None] * steps
