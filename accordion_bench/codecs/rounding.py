"""Stochastic rounding to the levels of a codebook, by comparison with random thresholds.

With r = x / norm clamped to [-1, 1], u uniform in [0, 1) and levels a <= r <= c, the code is that of c with probability
(r - a) / (c - a), else that of a: E[level] = r, Var[level] = (c - r)(r - a). Three rules give this distribution:

    even grid         floor(r s + s + u), s = (K - 1) / 2
    symmetric levels  magnitude: number of j with |r| > l_j + u (l_{j+1} - l_j); sign: that of r. Without a zero
                      level the sign is + if r > l_1 (2 u - 1), which is random between -l_1 and l_1 only
    any levels        number of j with r > L_j + u (L_{j+1} - L_j)

For a fixed u the thresholds ascend with j, so the count is a code. A coordinate equal to a level keeps that level. A
bucket of norm 0 decodes to zeros, whatever its codes.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from accordion_bench.tensors.kernels.dense_kernels import ANY, EVEN, SYMMETRIC, KernelRounding
from accordion_bench.tensors.upload import table

COUNTED = 2  # with more thresholds, a binary search is faster than comparisons one by one


def thresholds_between(levels: Sequence[float], bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the thresholds l_j + v width_j of the intervals between ascending levels: starts l_j and widths, float32.

    v = u 2^bits is an integer below 2^bits, so width_j = (l_{j+1} - l_j) 2^-bits. If floating-point rounding requires
    it, the width is reduced until l_j + v width_j < l_{j+1} for every v, so that a coordinate on a level keeps it.
    """
    ends, largest = np.array(levels, np.float32), np.float32(2**bits - 1)
    starts, widths = ends[:-1], (ends[1:] - ends[:-1]) * np.float32(2.0**-bits)
    # numbers above the middle between the end and its predecessor round to the end
    middle = (ends[1:].astype(np.float64) + np.nextafter(ends[1:], starts)) / 2
    widths = np.minimum(widths, np.nextafter(((middle - starts) / largest).astype(np.float32), np.float32(np.inf)))
    while True:
        fused = (starts + largest * widths.astype(np.float64)).astype(np.float32)  # the product is exact
        wide = np.maximum(fused, starts + largest * widths) >= ends[1:]
        if not wide.any():
            return starts.copy(), widths
        widths = np.where(wide, np.nextafter(widths, np.float32(0)), widths)


def random_bits(K: int) -> int:
    """Return the number of bits of u for K levels, such that K - 1 + u is exact in float32."""
    return 24 - (K - 1).bit_length()


@functools.lru_cache(maxsize=256)
def rounding_to(levels: tuple[float, ...]) -> KernelRounding:
    """Return the rule of rounding to these levels; cached.

    `scale` is the largest magnitude of normalised coordinates: s for an even grid, else 1. Thresholds of a symmetric
    codebook are between its non-negative levels; `central` are those from -l_1 to l_1, if zero is no level.

    Raises:
        ValueError: unless levels are 2 to 256 numbers in ascending order from -1 to 1.
    """
    K, singles = len(levels), np.array(levels, np.float32)
    if not 2 <= K <= 256 or levels[0] != -1 or levels[-1] != 1 or not (singles[1:] > singles[:-1]).all():
        raise ValueError(f"levels must be 2 to 256 numbers in ascending order from -1 to 1, got {levels}")
    bits = random_bits(K)
    if np.abs(np.linspace(-1, 1, K) - levels).max() <= 2.0**-25:  # half the spacing of float32 numbers below 1
        return KernelRounding(EVEN, K, bits, (K - 1) / 2, *thresholds_between(levels, bits))
    if (singles == -singles[::-1]).all():
        rule = KernelRounding(SYMMETRIC, K, bits, 1, *thresholds_between(levels[K // 2 :], bits))
        if K % 2:
            return rule
        return rule._replace(central=np.concatenate(thresholds_between(levels[K // 2 - 1 : K // 2 + 1], bits)))
    return KernelRounding(ANY, K, bits, 1, *thresholds_between(levels, bits))


def round_to_levels(x: Tensor, factor: Tensor, draws: Tensor, rounding: KernelRounding) -> Tensor:
    """Round coordinates to norm x level at random and unbiased; return codes, uint8 [..., N].

    Args:
        x: coordinates, float32 [..., N].
        factor: factor of the coordinates, see `coding.level_factors`, float32 [..., 1].
        draws: random integers below 2^bits, int32 [..., N].
        rounding: rule of rounding.

    Source: Alistarh et al. 2017 (arXiv 1610.02132) for even grids; Faghri et al. 2020 (arXiv 2010.12460) for any.
    """
    r, v, K = x * factor, draws.float(), rounding.K
    if rounding.kind == EVEN:
        r.add_(rounding.scale).clamp_(0, 2 * rounding.scale).add_(v.mul_(2.0**-rounding.bits))
        return r.to(torch.uint8)
    if rounding.kind == ANY:
        return count_below(r, v, rounding)
    positive = r > (_threshold(v, *rounding.central) if rounding.central.size else 0)
    code = count_below(r.abs_(), v, rounding).add_(K // 2)
    return torch.where(positive, code, K - 1 - code)


def count_below(r: Tensor, v: Tensor, rounding: KernelRounding) -> Tensor:
    """Return the number of thresholds below each r, uint8."""
    starts, widths = rounding.starts, rounding.widths
    if len(starts) <= COUNTED:
        pairs = zip(starts, widths, strict=True)
        return sum((r > _threshold(v, *pair)).to(torch.uint8) for pair in pairs)  # type: ignore[return-value]
    inner, *tables = _tables_on(starts.tobytes(), widths.tobytes(), r.device)
    j = torch.bucketize(r, inner, out_int32=True)
    start, width = (numbers.index_select(0, j.view(-1)).view(r.shape) for numbers in tables)
    return (j + (r > width.mul_(v).add_(start))).to(torch.uint8)


def _threshold(v: Tensor, start: float, width: float) -> Tensor:
    """Return a threshold; product and sum are rounded separately."""
    return (v * float(width)).add_(float(start))


@functools.lru_cache(maxsize=256)
def _tables_on(starts: bytes, widths: bytes, device: torch.device) -> tuple[Tensor, ...]:
    """Return the starts without the first, the starts and the widths on a device; cached."""
    with _disable_current_modes():  # cached tensors must not belong to a pretended device
        own, width = (torch.from_numpy(np.frombuffer(x, np.float32).copy()) for x in (starts, widths))
    return tuple(table(x, device) for x in (own[1:], own, width))
