"""A `Table` on a GPU, and what each program is to do."""

import functools

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors import upload
from accordion_bench.tensors.kernels import table
from accordion_bench.tensors.kernels.table import Table

N, SIZE, BUCKET = tl.constexpr(table.N), tl.constexpr(table.SIZE), tl.constexpr(table.BUCKET)
HEADER, CODES, MORE = tl.constexpr(table.HEADER), tl.constexpr(table.CODES), tl.constexpr(table.MORE)
KEPT = 256  # tables remembered


@functools.lru_cache(maxsize=KEPT)
def rows_on(own: Table, device: torch.device) -> Tensor:
    """The rows of a table, int64 [T + 1, columns]."""
    return upload.table(torch.from_numpy(own.rows), device)


@functools.lru_cache(maxsize=KEPT)
def slices_on(own: Table, size: int, device: torch.device) -> Tensor:
    """Slices of so many coordinates, int64 [programs, 2]: the tensor, and the slice's first coordinate."""
    n = own.rows[:-1, table.N]
    counts = -(-n // size)
    of = np.repeat(np.arange(len(n)), counts)
    begin = (np.arange(len(of)) - (counts.cumsum() - counts)[of]) * size
    return upload.table(torch.from_numpy(np.stack([of, begin], axis=1)), device)


@functools.lru_cache(maxsize=KEPT)
def buckets_on(own: Table, device: torch.device) -> Tensor:
    """Where the scale of each bucket is in a message, int64 [M]."""
    rows = own.rows
    counts = np.diff(rows[:, table.BUCKET])
    of = np.repeat(np.arange(len(counts)), counts)
    at = rows[of, table.HEADER] + 4 * (np.arange(len(of)) - rows[of, table.BUCKET])
    return upload.table(torch.from_numpy(at), device)


@functools.lru_cache(maxsize=KEPT)
def on_device(numbers: bytes, device: torch.device) -> Tensor:
    """Float32 numbers of a codebook, given as bytes."""
    return upload.table(torch.from_numpy(np.frombuffer(numbers, np.float32).copy()), device)


@triton.jit
def bucket_of(begin, j, size):  # type: ignore[no-untyped-def]
    """The buckets that coordinates begin + j lie in, int64; divides 32-bit numbers, for which GPUs are made."""
    most = tl.minimum(size, 1 << 30).to(tl.int32)
    left = tl.minimum(size - begin % size, 1 << 30).to(tl.int32)
    return begin // size + tl.where(j < left, 0, 1 + (j - left) // most)
