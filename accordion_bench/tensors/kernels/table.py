"""Table: positions of the coordinates, scales and codes of several tensors, for kernels; their execution in threads.

This module imports neither numba nor Triton.

Tensor suffixes: T tensors, M buckets of all of them, W local workers.
"""

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.keyed_rng import BLOCK

N, SIZE, BUCKET, TILE, PIECE, HEADER, CODES, MORE = range(8)
"""Columns of a table: number of coordinates; coordinates per bucket; buckets, tiles and pieces of previous tensors;
first byte in a message of the scales, of the codes and of the second stream of codes."""

LONGEST = 1 << 16  # coordinates of a piece of a long bucket
LEAST_TILES = 16  # fewest tiles per thread; fewer take less time than waking a thread
ONE, DIFFERENT = 0, -1  # results of `bucket_size`: each tensor is one bucket; sizes differ


class Table:
    """Several tensors, partitioned into tiles and into buckets.

    A tile is the unit of encoding and decoding for one thread: whole blocks of random numbers, whole bytes of codes. A
    piece is a bucket or a part of a long bucket, the unit of partial sums for one thread.

    Args:
        lengths: number of coordinates of each tensor.
        sizes: coordinates per bucket of each tensor; the last bucket may be shorter.
        tile: coordinates per tile.
        headers: first byte in a message of the scales of each tensor.
        streams: first byte in a message of each stream of codes, for each tensor.

    Attributes:
        rows: int64 [T + 1, 8], see above; the last row contains the total numbers of buckets, tiles and pieces.
        buckets, tiles, pieces: numbers of all tensors.
        tile: coordinates per tile.
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


@functools.lru_cache(maxsize=256)
def bucket_size(table: Table) -> int:
    """Return the coordinates per bucket if equal for all tensors longer than a bucket; else ONE or DIFFERENT."""
    n, size = table.rows[:-1, N], table.rows[:-1, SIZE]
    several = set(size[n > size].tolist())
    if not several:
        return ONE
    (first, *others) = several
    return DIFFERENT if others or (n[n <= size] > first).any() or first >= 1 << 30 else first


def contiguous(x_W: Tensor) -> Tensor:
    """Return [W, N] with contiguous rows; a copy if necessary."""
    return x_W if x_W.stride(1) == 1 else x_W.contiguous()


def addresses(rows_W: Sequence[Tensor]) -> np.ndarray:
    """Return the address of each row of tensors [W, N], int64 [W, T]; rows must be contiguous."""
    starts = np.array([x_W.data_ptr() for x_W in rows_W], np.int64)
    if len(rows_W[0]) == 1:
        return starts[None]
    steps = np.array([x_W.stride(0) * x_W.element_size() for x_W in rows_W], np.int64)
    return starts + np.arange(len(rows_W[0]))[:, None] * steps


# ---- threads


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "kernels")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked process does not inherit threads


def over_tiles(kernel: Callable[..., Any], tiles: int, *args: Any) -> None:
    """Call kernel(*args, first, last) for parts of the tiles, in at most `torch.get_num_threads()` threads.

    Args:
        kernel: function that releases the GIL and whose writes depend on the tile only.
        tiles: number of tiles.
        args: arguments of the kernel.
    """
    threads = min(torch.get_num_threads(), max(1, tiles // LEAST_TILES))
    if threads == 1:
        kernel(*args, 0, tiles)
        return
    ends = [tiles * part // threads for part in range(threads + 1)]
    rest = [_pool().submit(kernel, *args, first, last) for first, last in itertools.pairwise(ends[1:])]
    kernel(*args, 0, ends[1])
    for part in rest:
        part.result()
