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
ONE, DIFFERENT = tl.constexpr(table.ONE), tl.constexpr(table.DIFFERENT)
KEPT = 256  # tables remembered
SLICE = tl.constexpr(5)
TENSOR, BEGIN, OF_BUCKET, LEFT, INVERSE = (tl.constexpr(column) for column in range(5))
"""Columns of slices: the tensor; the slice's first coordinate, the bucket it is of, and how many of its coordinates are
left from there on; what divides a number below 2^16 by the size of a bucket: the upper half of the product, where the
size is not 1."""
LONG = 1 << 30  # more coordinates than a slice has


@functools.lru_cache(maxsize=KEPT)
def rows_on(own: Table, device: torch.device) -> Tensor:
    """The rows of a table, int64 [T + 1, columns]."""
    return upload.table(torch.from_numpy(own.rows), device)


@functools.lru_cache(maxsize=KEPT)
def slices_on(own: Table, size: int, device: torch.device) -> Tensor:
    """Slices of so many coordinates, int64 [programs, SLICE]: see `TENSOR` and the columns behind it."""
    n, most = own.rows[:-1, table.N], own.rows[:-1, table.SIZE]
    counts = -(-n // size)
    of = np.repeat(np.arange(len(n)), counts)
    begin = (np.arange(len(of)) - (counts.cumsum() - counts)[of]) * size
    left = np.minimum(most[of] - begin % most[of], LONG)
    inverse = -(-(1 << 32) // np.minimum(most[of], LONG))
    columns = [of, begin, begin // most[of], left, np.minimum(inverse, (1 << 32) - 1)]
    return upload.table(torch.from_numpy(np.stack(columns, axis=1)), device)


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


def aligned(addresses: np.ndarray, element: torch.dtype) -> bool:
    """Whether each row of coordinates begins where 16 bytes can be read at once."""
    return element == torch.float32 and not (addresses % 16).any()


@triton.jit
def slice_of(slices, K_GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's row of the slices, its tensor and its first coordinate, which is a multiple of so many."""
    own = slices + SLICE * tl.program_id(0)
    return own, tl.load(own + TENSOR), tl.multiple_of(tl.load(own + BEGIN), K_GROUPS)


@triton.jit
def buckets_at(own, begin, j, n, size, GROUP: tl.constexpr, BUCKET: tl.constexpr):  # type: ignore[no-untyped-def]
    """The buckets that coordinates begin + j lie in, int64; which of them begin there, and which there are.

    Of the shape of `j` [groups, 8], or broadcast to it: one for each group, where no bucket ends within one, or one
    for all. A bucket's size is known when the kernel is compiled, or the slice's row `own` says how to divide by it.
    """
    if BUCKET == ONE:
        none = tl.zeros([1, 1], tl.int64)
        return none, none + begin == 0, none < n
    elif BUCKET == DIFFERENT:
        behind = j - tl.load(own + LEFT).to(tl.int32)  # in the first bucket it is negative
        past = tl.maximum(behind, 0)
        quotient = tl.umulhi(past.to(tl.uint32), tl.load(own + INVERSE).to(tl.uint32)).to(tl.int32)
        quotient = tl.where(size == 1, past, quotient)
        bucket = tl.load(own + OF_BUCKET)
        first = tl.where(behind < 0, (j == 0) & (begin == bucket * size), past == quotient * size.to(tl.int32))
        return bucket + tl.where(behind < 0, 0, 1 + quotient), first, begin + j < n
    elif BUCKET % GROUP == 0:
        at = (begin % BUCKET).to(tl.int32) + tl.min(j, axis=1, keep_dims=True)
        return begin // BUCKET + at // BUCKET, at % BUCKET == 0, begin + tl.min(j, axis=1, keep_dims=True) < n
    else:
        at = (begin % BUCKET).to(tl.int32) + j
        return begin // BUCKET + at // BUCKET, at % BUCKET == 0, begin + j < n
