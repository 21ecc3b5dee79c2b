"""Casts on a GPU: local workers' shares of a mean to a 16-bit message, and messages to 32 or 64 bits.

The result equals that of `kernels.casts`: x / A, rounded to the dtype, clamped to [-most, most], summed in float32.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors.kernels.on_gpu.launch import CODES, TYPES, N, aligned, launch, rows_on, slice_of, slices_on
from accordion_bench.tensors.kernels.table import CODES as STARTS
from accordion_bench.tensors.kernels.table import Table, addresses
from accordion_bench.tensors.upload import upload

SLICE = 2048  # coordinates of a program


def sum_of_shares(rows_W: Sequence[Tensor], table: Table, workers: int, most: float, total_B: Tensor) -> None:
    """Concatenate and sum the shares of tensors [W, N]; one launch.

    Args:
        rows_W: tensors.
        table: lengths of the tensors, and first bytes of their shares.
        workers: number of workers of the run, A.
        most: largest share.
        total_B: output, float16 or bfloat16.
    """
    there, where = total_B.device, addresses(rows_W)
    launch(
        _add_up,
        (len(slices_on(table, SLICE, there)),),
        there,
        *(upload(torch.from_numpy(where), there), len(rows_W), len(where), rows_on(table, there)),
        *(slices_on(table, SLICE, there), float(workers), float(most), _taken(total_B)),
        COLUMNS=table.rows.shape[1],
        TYPE=TYPES[rows_W[0].dtype],
        ALIGNED=aligned(where, rows_W[0].dtype) and not (table.rows[:-1, STARTS] % 16).any(),
        HALF=total_B.dtype == torch.float16,
        DIVIDED=workers != 1,
        ALONE=len(where) == 1,
        SLICE=SLICE,
    )


def widen(narrow_B: Tensor, wide_B: Tensor) -> None:
    """Convert a message of 16-bit numbers to float32 or float64; one launch."""
    grid = (triton.cdiv(len(wide_B), SLICE),)
    half = narrow_B.dtype == torch.float16
    launch(_widen, grid, wide_B.device, _taken(narrow_B), wide_B, len(wide_B), HALF=half, SLICE=SLICE)


def _taken(narrow_B: Tensor) -> Tensor:
    """Return the tensor for kernels: bfloat16 as int16."""
    return narrow_B if narrow_B.dtype == torch.float16 else narrow_B.view(torch.int16)


@triton.jit
def _add_up(  # type: ignore[no-untyped-def]
    addresses, T, W, rows, slices, workers, most, out,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr, HALF: tl.constexpr, DIVIDED: tl.constexpr,
    ALONE: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    _, t, begin = slice_of(slices, 16)
    n = tl.load(rows + t * COLUMNS + N)
    start = tl.multiple_of(tl.load(rows + t * COLUMNS + CODES) // 2, 8 if ALIGNED else 1)
    j = tl.arange(0, SLICE)
    total = tl.zeros([SLICE], tl.float32)
    if begin + SLICE <= n:
        for w in range(W):
            x = tl.multiple_of(tl.load(addresses + w * T + t).to(tl.pointer_type(TYPE)), 16 if ALIGNED else 4)
            share = _share(tl.load(x + begin + j), workers, most, HALF, DIVIDED)
            total = share if ALONE else total + share  # of one worker -0 as well
        tl.store(out + start + begin + j, _narrow(total, HALF))
    else:
        exists = j < tl.minimum(n - begin, SLICE).to(tl.int32)
        for w in range(W):
            x = tl.load(addresses + w * T + t).to(tl.pointer_type(TYPE))
            share = _share(tl.load(x + begin + j, mask=exists, other=0), workers, most, HALF, DIVIDED)
            total = share if ALONE else total + share
        tl.store(out + start + begin + j, _narrow(total, HALF), mask=exists)


@triton.jit
def _share(x, workers, most, HALF: tl.constexpr, DIVIDED: tl.constexpr):  # type: ignore[no-untyped-def]
    """x / A rounded to the 16-bit dtype, in float32."""
    if DIVIDED:
        x = tl.div_rn(x, workers) if x.dtype == tl.float32 else x / workers
    x = x.to(tl.float32)
    if HALF:
        x = x.to(tl.float16).to(tl.float32)
        return tl.where(x > most, most, tl.where(x < -most, -most, x))  # NaN stays
    else:
        return _wide(_narrow(x, HALF), HALF)


@triton.jit
def _narrow(x, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 rounded to 16 bits, ties to even."""
    if HALF:
        return x.to(tl.float16)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.int16, bitcast=True)


@triton.jit
def _wide(narrow, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Inverse of `_narrow`."""
    if HALF:
        return narrow.to(tl.float32)
    else:
        return (narrow.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _widen(narrow, wide, n, HALF: tl.constexpr, SLICE: tl.constexpr):  # type: ignore[no-untyped-def]
    begin = tl.program_id(0).to(tl.int64) * SLICE
    j = tl.arange(0, SLICE)
    if begin + SLICE <= n:
        tl.store(wide + begin + j, _wide(tl.load(narrow + begin + j), HALF).to(wide.dtype.element_ty))
    else:
        exists = j < tl.minimum(n - begin, SLICE).to(tl.int32)
        own = tl.load(narrow + begin + j, mask=exists, other=0)
        tl.store(wide + begin + j, _wide(own, HALF).to(wide.dtype.element_ty), mask=exists)
