"""Stochastic rounding to the levels of a codebook; see `codecs.rounding` for the three ways."""

import numpy as np

from accordion_bench.tensors.kernels.compiled import compiled, f32, i64, u8, u32
from accordion_bench.tensors.kernels.counter_hash import integer

COUNTED = 16  # up to so many thresholds each is compared with; beyond, a binary search is faster


@compiled
def round_evenly(x, factor, scale, lanes, word, odd, bits, codes):  # type: ignore[no-untyped-def]
    """floor(r + s + u), r cut to [-s, s]."""
    shift, unit, top = u32(32 - bits), f32(2.0) ** f32(-bits), scale + scale
    for i in range(codes.size):
        u = f32(np.int32(integer(lanes[i], word, odd, shift))) * unit
        codes[i] = u8(np.int32(min(max(f32(x[i]) * factor + scale, f32(0)), top) + u))


@compiled
def normalise(x, factor, r):  # type: ignore[no-untyped-def]
    for i in range(r.size):
        r[i] = f32(x[i]) * factor


@compiled
def round_symmetrically(r, v, starts, widths, central, K, codes):  # type: ignore[no-untyped-def]
    """The magnitude's code, and the sign's half of the codebook; overwrites r."""
    positive = np.empty(r.size, np.uint8)
    start, width = (central[0], central[1]) if central.size else (f32(0), f32(0))
    for i in range(r.size):
        positive[i] = u8(r[i] > start + v[i] * width)
    for i in range(r.size):
        r[i] = abs(r[i])
    count_below(r, v, starts, widths, codes)
    above = u8(K // 2)
    for i in range(codes.size):
        code = codes[i] + above
        codes[i] = code if positive[i] else u8(K - 1) - code


@compiled
def count_below(r, v, starts, widths, codes):  # type: ignore[no-untyped-def]
    """How many thresholds lie below each r; they ascend."""
    if starts.size > COUNTED:
        search(r, v, starts, widths, codes)
        return
    for i in range(codes.size):
        codes[i] = u8(r[i] > starts[0] + v[i] * widths[0])
    for j in range(1, starts.size):
        start, width = starts[j], widths[j]
        for i in range(codes.size):
            codes[i] += u8(r[i] > start + v[i] * width)


@compiled
def search(r, v, starts, widths, codes):  # type: ignore[no-untyped-def]
    """The same: thresholds of the intervals below that of r lie below it, those of intervals above do not."""
    ends = np.full(256, np.inf, np.float32)  # a power of two of them: no step leaves it
    ends[: starts.size] = starts
    for i in range(codes.size):
        low = 0
        for k in range(8):  # no branch, which would not be predictable
            low += i64(ends[low + (128 >> k)] < r[i]) << (7 - k)
        codes[i] = u8(low) + u8(r[i] > starts[low] + v[i] * widths[low])
