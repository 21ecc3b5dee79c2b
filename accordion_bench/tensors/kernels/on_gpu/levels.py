"""Stochastic rounding to the levels of a codebook; see `codecs.rounding` for the three ways."""

import triton
import triton.language as tl

COUNTED = tl.constexpr(16)  # up to so many thresholds each is compared with; beyond, a binary search is faster


@triton.jit
def round_evenly(r, v, scale, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """floor(r + s + u), r cut to [-s, s]."""
    unit: tl.constexpr = 1.0 / (1 << BITS)
    return (tl.minimum(tl.maximum(r + scale, 0.0), scale + scale) + v * unit).to(tl.int32)


@triton.jit
def round_symmetrically(  # type: ignore[no-untyped-def]
    r, v, starts, widths, central_start, central_width, K: tl.constexpr, COUNT: tl.constexpr
):
    """The magnitude's code, and the sign's half of the codebook."""
    positive = r > central_start + v * central_width
    code = count_below(tl.abs(r), v, starts, widths, COUNT) + K // 2
    return tl.where(positive, code, K - 1 - code)


@triton.jit
def count_below(r, v, starts, widths, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many thresholds lie below each r; they ascend."""
    if COUNT > COUNTED:
        return search(r, v, starts, widths, COUNT)
    else:
        codes = (r > tl.load(starts) + v * tl.load(widths)).to(tl.int32)
        for j in range(1, COUNT):
            codes += (r > tl.load(starts + j) + v * tl.load(widths + j)).to(tl.int32)
        return codes


@triton.jit
def search(r, v, starts, widths, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same: thresholds of the intervals below that of r lie below it, those of intervals above do not."""
    low = tl.zeros(r.shape, tl.int32)
    for k in tl.static_range(8):
        step = low + (128 >> k)
        below = tl.load(starts + step, mask=step < COUNT, other=float("inf")) < r
        low = tl.where(below, step, low)
    return low + (r > tl.load(starts + low) + v * tl.load(widths + low)).to(tl.int32)
