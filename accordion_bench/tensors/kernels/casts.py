"""Casts to 16 bits: each worker's share of a mean, straight into the message, and what was sent of it.

A share is x / A, cut to +-most, rounded to the nearest (of two the even one); NaN stays NaN. float64 passes through
float32. numba knows neither type: bfloat16 are the upper bits of a float32, float16 one instruction of the processor.
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
    """Whether machine code is made for a processor that converts float16 itself."""
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
    """out = the numbers of a message of uint16, tile by tile."""
    bits, wide = message[first * tile : last * tile], out[first * tile : last * tile]
    if half:
        for i in range(wide.size):
            wide[i] = _of_half_bits(bits[i])
    else:
        for i in range(wide.size):
            wide[i] = _of_brain_bits(bits[i])


@compiled
def add_up_shares(sources, rows, tile, workers, most, half, like, message, first, last):  # type: ignore[no-untyped-def]
    """message = the sum of the local workers' shares, in float32 and in their order, rounded once more.

    Args:
        sources: addresses of the tensors, int64 [W, T].
        rows, tile: of their table.
        workers: A, of the tensors' type.
        most: the largest magnitude of a share, float32.
        half: float16; else bfloat16, which ends where float32 ends, so that nothing is cut.
        like: an array of the tensors' type.
        message: uint16.
        first, last: tiles.
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
    """Each target -= A x what its worker's share of the source says; arguments as above, targets as sources."""
    bits = np.empty(tile, u16)
    for t in range(len(rows) - 1):
        for place in range(max(first, rows[t, TILE]), min(last, rows[t + 1, TILE])):
            a = (place - rows[t, TILE]) * tile
            b = min(rows[t, N], a + tile)
            for w in range(len(sources)):
                _narrow(array_at(sources[w, t], b, like)[a:b], workers, most, half, bits)
                _add_widened(bits, half, -workers, array_at(targets[w, t], b, like)[a:b])
