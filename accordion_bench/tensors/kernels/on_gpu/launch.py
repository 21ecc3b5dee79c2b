"""Launch of Triton kernels, and their tables on a GPU: a `Table`, and the slice or part of each program."""

import contextlib
import functools
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors import upload
from accordion_bench.tensors.kernels import table
from accordion_bench.tensors.kernels.on_gpu.packing import GROUPS, left_of
from accordion_bench.tensors.kernels.table import Table
from accordion_bench.tensors.permutations import Draws

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


def stride(x: Tensor) -> int:
    """Return the row stride of [W, M] in elements; 0 for equal rows or a vector."""
    return x.stride(0) if x.ndim > 1 else 0


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any) -> None:
    """Launch a kernel asynchronously.

    Args:
        kernel: function of `triton.jit`.
        grid: numbers of programs; no launch if one is 0.
        device: device of the tensors, which may differ from the current device.
        args: tensors and numbers.
        constants: constants of the compilation.
    """
    if 0 not in grid:
        start(kernel, grid, device, args, constants)


def start(
    kernel: Any, grid: tuple[int, ...], device: torch.device, args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Launch once, without fused multiply-add, so that codes equal those of torch bit for bit."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*args, **constants, enable_fp_fusion=False)


N, SIZE, BUCKET = tl.constexpr(table.N), tl.constexpr(table.SIZE), tl.constexpr(table.BUCKET)
HEADER, CODES, MORE = tl.constexpr(table.HEADER), tl.constexpr(table.CODES), tl.constexpr(table.MORE)
ONE, DIFFERENT = tl.constexpr(table.ONE), tl.constexpr(table.DIFFERENT)
KEPT = 256  # cached tables
SLICE = tl.constexpr(5)
TENSOR, BEGIN, OF_BUCKET, LEFT, INVERSE = (tl.constexpr(column) for column in range(5))
"""Columns of slices: tensor; first coordinate; bucket of that coordinate; coordinates from there to the end of the
bucket; multiplier: the upper half of its product with a number below 2^16 is that number / bucket size, if not 1."""
LONG = 1 << 30  # exceeds the coordinates of a slice


@functools.lru_cache(maxsize=KEPT)
def rows_on(own: Table | Draws, device: torch.device) -> Tensor:
    """Return the rows of a table or of draws on a device, int64 [T + 1, columns]; cached."""
    return upload.table(torch.from_numpy(own.rows), device)


@functools.lru_cache(maxsize=KEPT)
def parts_on(counts: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Return `parts_of` on a device; cached."""
    return upload.table(torch.from_numpy(parts_of(np.array(counts, np.int64), size)), device)


def parts_of(counts: np.ndarray, size: int) -> np.ndarray:
    """Return a table of `counts` parts of each tensor, int64 [P, 2]: the tensor, and the first entry of the part."""
    of = np.repeat(np.arange(len(counts)), counts)
    begin = (np.arange(len(of)) - (counts.cumsum() - counts)[of]) * size
    return np.stack([of, begin], axis=1)


@functools.lru_cache(maxsize=KEPT)
def slices_on(own: Table, size: int, device: torch.device) -> Tensor:
    """Return slices of `size` coordinates, int64 [programs, SLICE], with the columns `TENSOR` and following; cached."""
    n, most = own.rows[:-1, table.N], own.rows[:-1, table.SIZE]
    of, begin = parts_of(-(-n // size), size).T
    left = np.minimum(most[of] - begin % most[of], LONG)
    inverse = -(-(1 << 32) // np.minimum(most[of], LONG))
    columns = [of, begin, begin // most[of], left, np.minimum(inverse, (1 << 32) - 1)]
    return upload.table(torch.from_numpy(np.stack(columns, axis=1)), device)


@functools.lru_cache(maxsize=KEPT)
def buckets_on(own: Table, device: torch.device) -> Tensor:
    """Return the first byte of the scale of each bucket in a message, int64 [M]; cached."""
    of, within = parts_of(np.diff(own.rows[:, table.BUCKET]), 4).T
    return upload.table(torch.from_numpy(own.rows[of, table.HEADER] + within), device)


@functools.lru_cache(maxsize=KEPT)
def on_device(numbers: bytes, device: torch.device) -> Tensor:
    """Return the float32 numbers of a codebook, given as bytes, on a device; cached."""
    return upload.table(torch.from_numpy(np.frombuffer(numbers, np.float32).copy()), device)


def aligned(addresses: np.ndarray, element: torch.dtype) -> bool:
    """Return whether all rows are float32 and aligned to 16 bytes."""
    return element == torch.float32 and not (addresses % 16).any()


@triton.jit
def slice_of(slices, K_GROUPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row of a program in the table of slices, tensor, and first coordinate, a multiple of K_GROUPS."""
    own = slices + SLICE * tl.program_id(0)
    return own, tl.load(own + TENSOR), tl.multiple_of(tl.load(own + BEGIN), K_GROUPS)


@triton.jit
def buckets_at(own, begin, j, n, size, GROUP: tl.constexpr, BUCKET: tl.constexpr):  # type: ignore[no-untyped-def]
    """Buckets of coordinates begin + j, int64; which coordinates are the first of a bucket, and which exist.

    The shape is that of `j` [groups, 8] or broadcasts to it: one per group if no bucket ends within a group, or one for
    all. It is [1, 2] if `in_two`, see `of_lanes`. The size of a bucket is a constant, or the row `own` of the slice
    contains its inverse.
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
        return bucket + tl.where(behind < 0, 0, 1 + quotient), first, j < left_of(begin, n)
    elif in_two(GROUP, BUCKET):
        bucket = begin // BUCKET + tl.arange(0, 2)[None, :]
        first = bucket * BUCKET
        return bucket, (first >= begin) & (first < begin + GROUPS * GROUP), first < n
    elif BUCKET % GROUP == 0:
        at = (begin % BUCKET).to(tl.int32) + tl.min(j, axis=1, keep_dims=True)
        return begin // BUCKET + at // BUCKET, at % BUCKET == 0, tl.min(j, axis=1, keep_dims=True) < left_of(begin, n)
    else:
        at = (begin % BUCKET).to(tl.int32) + j
        return begin // BUCKET + at // BUCKET, at % BUCKET == 0, j < left_of(begin, n)


@triton.constexpr_function
def in_two(GROUP, BUCKET):  # type: ignore[no-untyped-def]
    """Whether buckets of a known size are so long that a slice contains coordinates of at most two."""
    slice = GROUPS.value * GROUP
    return BUCKET not in (table.ONE, table.DIFFERENT) and (slice <= BUCKET or slice == 2 * BUCKET)


@triton.jit
def of_lanes(numbers, begin, j, GROUP: tl.constexpr, BUCKET: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return numbers of buckets, in the shape of `buckets_at`, in a shape that broadcasts to `j`."""
    if in_two(GROUP, BUCKET):
        one, other = tl.split(numbers)
        if BUCKET % GROUP == 0:
            j = tl.arange(0, GROUPS)[:, None] * GROUP
        return tl.where(j < BUCKET - (begin % BUCKET).to(tl.int32), one[:, None], other[:, None])
    else:
        return numbers
