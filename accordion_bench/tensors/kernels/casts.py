"""Casts to 16 bits on a CPU: shares of a mean into messages, and subtraction of the sent shares.

A share is x / A, clamped to [-most, most] and rounded to nearest, ties to even; NaN stays NaN. float64 is converted to
float32 first. numba supports neither dtype: bfloat16 is the upper half of a float32, float16 one CPU instruction.
"""

import functools
import platform
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import config, types
from numba.extending import intrinsic

from accordion_bench.tensors.kernels.compiled import array_at, bits_of, compiled, f32, float_of, u32
from accordion_bench.tensors.kernels.table import CODES, TILE, N

u16 = np.uint16


@functools.cache
def converts_float16() -> bool:
    """Return whether the target processor has instructions for conversion to float16."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return True
    told = config.CPU_FEATURES  # type: ignore[attr-defined]  # set from the environment
    return "+f16c" in (binding.get_host_cpu_features().flatten() if told is None else told)


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
def widen(message, half, tile, out, first, last):  # type: ignore[no-untyped-def]
    """Convert a message of uint16 to `out`, by tiles."""
    bits, wide = message[first * tile : last * tile], out[first * tile : last * tile]
    if half:
        for i in range(wide.size):
            wide[i] = _of_half_bits(bits[i])
    else:
        for i in range(wide.size):
            wide[i] = _of_brain_bits(bits[i])


@compiled
def add_up_shares(sources, rows, tile, workers, most, half, like, message, first, last):  # type: ignore[no-untyped-def]
    """Write the sum of the local workers' shares, in their order in float32 and rounded once, to the message.

    Args:
        sources: addresses of the tensors, int64 [W, T].
        rows, tile: rows and tile size of their table.
        workers: A, in the dtype of the tensors.
        most: largest magnitude of a share, float32.
        half: whether to use float16; otherwise bfloat16, which has the range of float32, so that nothing is clamped.
        like: array with the dtype of the tensors.
        message: output, uint16.
        first, last: range of tiles.
    """
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
def subtract_shares(targets, sources, rows, tile, workers, most, half, like, first, last):  # type: ignore[no-untyped-def]
    """Subtract A x the share of the source from each target; arguments as above, targets as sources."""
    bits = np.empty(tile, u16)
    for t in range(len(rows) - 1):
        for place in range(max(first, rows[t, TILE]), min(last, rows[t + 1, TILE])):
            a = (place - rows[t, TILE]) * tile
            b = min(rows[t, N], a + tile)
            for w in range(len(sources)):
                _narrow(array_at(sources[w, t], b, like)[a:b], workers, most, half, bits)
                _add_widened(bits, half, -workers, array_at(targets[w, t], b, like)[a:b])
