"""Casts to 16 bits on a CPU: shares of a mean into messages, and subtraction of the sent shares.

A share is x / A, clamped to [-most, most] and rounded to nearest, ties to even; NaN stays NaN. float64 is converted to
float32 first. numba supports neither dtype: bfloat16 is the upper half of a float32, float16 one CPU instruction.
"""

import functools
import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import binding, ir
from numba.core import config, types
from numba.extending import intrinsic
from torch import Tensor

from accordion_bench.tensors.kernels.compiled import array_at, bits_of, compiled, f32, float_of, u32
from accordion_bench.tensors.kernels.table import CODES, TILE, N, Table, addresses, over_tiles

u16 = np.uint16
PART = 1 << 14  # numbers that a thread widens at once


@functools.cache
def converts_float16() -> bool:
    """Return whether the target processor has instructions for conversion to float16."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True
    told = config.CPU_FEATURES  # type: ignore[attr-defined]  # set from the environment
    return "+f16c" in (binding.get_host_cpu_features().flatten() if told is None else told)


def sum_of_shares(rows_W: Sequence[Tensor], table: Table, workers: int, most: float, total_B: Tensor) -> None:
    """Concatenate and sum the shares of tensors, in the order of the workers in float32, rounded once.

    Args:
        rows_W: tensors [W, ...] with dense rows.
        table: lengths of the tensors, and first bytes of their shares.
        workers: number of workers of the run, A.
        most: largest share; bfloat16 has the range of float32, so that nothing is clamped.
        total_B: output, float16 or bfloat16.
    """
    args = _arguments(rows_W, table, workers, most, total_B.dtype)
    over_tiles(_add_up_shares, table.tiles, *args, _bits(total_B))


def subtract_shares(
    targets_W: Sequence[Tensor], rows_W: Sequence[Tensor], table: Table, workers: int, most: float, dtype: torch.dtype
) -> None:
    """Subtract A x the share of its tensor from each target in place; arguments as for `sum_of_shares`."""
    args = _arguments(rows_W, table, workers, most, dtype)
    over_tiles(_subtract_shares, table.tiles, addresses(targets_W), *args)


def widen(narrow_B: Tensor, wide_B: Tensor) -> None:
    """Convert a message of 16-bit numbers to float32 or float64."""
    half, parts = narrow_B.dtype == torch.float16, -(-len(narrow_B) // PART)
    over_tiles(_widen, parts, _bits(narrow_B), half, wide_B.numpy())


def _bits(narrow_B: Tensor) -> np.ndarray:
    return narrow_B.view(torch.uint16).numpy()


def _arguments(
    rows_W: Sequence[Tensor], table: Table, workers: int, most: float, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Return addresses, rows, tile, A in the dtype of the tensors, most, whether float16, array of that dtype."""
    like = np.empty(0, np.float32 if rows_W[0].dtype == torch.float32 else np.float64)
    cast = like.dtype.type(workers), np.float32(most), dtype == torch.float16
    return addresses(rows_W), table.rows, table.tile, *cast, like


@intrinsic
def _half_bits(context: Any, x: Any) -> Any:
    def fptrunc(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), fptrunc


@intrinsic
def _of_half_bits(context: Any, bits: Any) -> Any:
    def fpext(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), fpext


@compiled
def _brain_bits(x):  # type: ignore[no-untyped-def]
    bits = bits_of(x)
    rounded = (bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)
    return u16(rounded) if x == x else u16(0x7FC0)


@compiled
def _of_brain_bits(bits):  # type: ignore[no-untyped-def]
    return float_of(u32(bits) << u32(16))


@compiled
def _cut(x, most):  # type: ignore[no-untyped-def]
    return most if x > most else -most if x < -most else x


@compiled
def _narrow(x, workers, most, half, out):  # type: ignore[no-untyped-def]
    if half:
        for i in range(x.size):
            out[i] = _half_bits(_cut(f32(x[i] / workers), most))
    else:
        for i in range(x.size):
            out[i] = _brain_bits(f32(x[i] / workers))


@compiled
def _add_widened(bits, half, factor, out):  # type: ignore[no-untyped-def]
    if half:
        for i in range(out.size):
            out[i] += factor * _of_half_bits(bits[i])
    else:
        for i in range(out.size):
            out[i] += factor * _of_brain_bits(bits[i])


@compiled
def _widen(message, half, out, first, last):  # type: ignore[no-untyped-def]
    bits, wide = message[first * PART : last * PART], out[first * PART : last * PART]
    if half:
        for i in range(wide.size):
            wide[i] = _of_half_bits(bits[i])
    else:
        for i in range(wide.size):
            wide[i] = _of_brain_bits(bits[i])


@compiled
def _add_up_shares(sources, rows, tile, workers, most, half, like, message, first, last):  # type: ignore[no-untyped-def]
    bits, total, one, unbounded = np.empty(tile, u16), np.empty(tile, f32), f32(1), f32(np.inf)
    for t in range(len(rows) - 1):
        for place in range(max(first, rows[t, TILE]), min(last, rows[t + 1, TILE])):
            a = (place - rows[t, TILE]) * tile
            b = min(rows[t, N], a + tile)
            out = message[rows[t, CODES] // 2 + a : rows[t, CODES] // 2 + b]
            if len(sources) == 1:
                _narrow(array_at(sources[0, t], b, like)[a:b], workers, most, half, out)
                continue
            total[: b - a] = 0
            for w in range(len(sources)):
                _narrow(array_at(sources[w, t], b, like)[a:b], workers, most, half, bits)
                _add_widened(bits, half, one, total[: b - a])
            _narrow(total[: b - a], one, unbounded, half, out)


@compiled
def _subtract_shares(targets, sources, rows, tile, workers, most, half, like, first, last):  # type: ignore[no-untyped-def]
    bits = np.empty(tile, u16)
    for t in range(len(rows) - 1):
        for place in range(max(first, rows[t, TILE]), min(last, rows[t + 1, TILE])):
            a = (place - rows[t, TILE]) * tile
            b = min(rows[t, N], a + tile)
            for w in range(len(sources)):
                _narrow(array_at(sources[w, t], b, like)[a:b], workers, most, half, bits)
                _add_widened(bits, half, -workers, array_at(targets[w, t], b, like)[a:b])
