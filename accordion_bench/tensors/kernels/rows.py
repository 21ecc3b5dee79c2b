"""Rows: one row per worker and tensor of a bucket, for kernels that process rows independently.

Tensor suffixes: T tensors, W workers, R rows.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.kernels.table import addresses

ADDRESS, N, TILE = range(3)  # columns of `Rows.table`
SIZE = 1 << 16  # coordinates of a tile; fits into a second-level cache


class Rows:
    """Addresses of rows, partitioned into tiles.

    Args:
        rows_W: tensors [W, N] of one dtype with contiguous rows. References are kept, since they may be copies.

    Attributes:
        table: int64 [R + 1, 3], the columns above: address, number of coordinates, number of tiles of previous rows.
            Row w T + t is worker w's part of tensor t; the last row contains the total number of tiles.
        count: number of rows, R.
        tiles: number of tiles of all rows.
        dtype: NumPy dtype of coordinates.
    """

    def __init__(self, rows_W: Sequence[Tensor]) -> None:
        workers, self._kept = len(rows_W[0]), rows_W
        self.count = workers * len(rows_W)
        self.table = np.zeros((self.count + 1, 3), np.int64)
        self.table[:-1, ADDRESS] = addresses(rows_W).ravel()
        self.table[:-1, N] = np.tile(np.array([x_W.shape[1] for x_W in rows_W], np.int64), workers)
        self.table[1:, TILE] = (-(-self.table[:-1, N] // SIZE)).cumsum()
        self.tiles = int(self.table[-1, TILE])
        self.dtype = np.float32 if rows_W[0].dtype == torch.float32 else np.float64


def sent_to_rows(message_A: Tensor, starts: Sequence[int], rows: int) -> np.ndarray:
    """Return addresses of messages [A, B], where sender a adds to row a mod R: int64 [R, T, A / R].

    Args:
        message_A: bytes, one row per sender.
        starts: first byte of each tensor in a row.
        rows: number of rows of sums, R.
    """
    senders = np.arange(rows)[:, None, None] + rows * np.arange(len(message_A) // rows)
    return message_A.data_ptr() + message_A.stride(0) * senders + np.array(starts, np.int64)[:, None]
