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
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from accordion_bench.tensors.kernels import rounding as kinds
from accordion_bench.tensors.upload import table

COUNTED = 2  # with more thresholds, a binary search is faster than comparisons one by one


@dataclass(frozen=True)
class Thresholds:
    """Thresholds l_j + v width_j of the intervals between adjacent levels.

    v = u 2^bits is an integer below 2^bits, so width_j = (l_{j+1} - l_j) 2^-bits. If floating-point rounding requires
    it, the width is reduced until l_j + v width_j < l_{j+1} for every v, so that a coordinate on a level keeps it.
    """

    starts: Tensor
    widths: Tensor
    _there: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return the starts without the first, the starts and the widths on a device; cached."""
        if device not in self._there:
            first, starts, widths = (table(x, device) for x in (self.starts[1:], self.starts, self.widths))
            self._there[device] = first, starts, widths
        return self._there[device]

    @classmethod
    def between(cls, levels: Sequence[float], bits: int) -> "Thresholds":
        """Return the thresholds between ascending levels, for `bits` bits of u."""
        ends, largest = np.array(levels, np.float32), np.float32(2**bits - 1)
        starts, widths = ends[:-1], (ends[1:] - ends[:-1]) * np.float32(2.0**-bits)
        # numbers above the middle between the end and its predecessor round to the end
        middle = (ends[1:].astype(np.float64) + np.nextafter(ends[1:], starts)) / 2
        widths = np.minimum(widths, np.nextafter(((middle - starts) / largest).astype(np.float32), np.float32(np.inf)))
        while True:
            fused = (starts + largest * widths.astype(np.float64)).astype(np.float32)  # the product is exact
            wide = np.maximum(fused, starts + largest * widths) >= ends[1:]
            if not wide.any():
                with _disable_current_modes():  # cached tensors must not belong to a pretended device
                    return cls(torch.from_numpy(starts.copy()), torch.from_numpy(widths))
            widths = np.where(wide, np.nextafter(widths, np.float32(0)), widths)

    def at(self, j: int, v: Tensor) -> Tensor:
        """Return threshold j; product and sum are rounded separately."""
        return (v * float(self.widths[j])).add_(float(self.starts[j]))

    def around(self, r: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of the interval that contains each r, int32, and its threshold."""
        inner, *tables = self._on(r.device)
        j = torch.bucketize(r, inner, out_int32=True)
        starts, widths = (numbers.index_select(0, j.view(-1)).view(r.shape) for numbers in tables)
        return j, widths.mul_(v).add_(starts)


@dataclass(frozen=True)
class Rounding:
    """Rule of rounding to K levels.

    kind: `even`, `symmetric` or `any`.
    scale: largest magnitude of normalised coordinates: s for an even grid, else 1.
    bits: number of bits of u, such that K - 1 + u is exact in float32.
    intervals: thresholds between the levels; `symmetric`: between the non-negative levels.
    central: thresholds from -l_1 to l_1, which determine the sign if zero is no level.
    """

    K: int
    kind: str
    scale: float
    bits: int
    intervals: Thresholds
    central: Thresholds | None = None


def random_bits(K: int) -> int:
    """Return the number of bits of u for K levels, such that K - 1 + u is exact in float32."""
    return 24 - (K - 1).bit_length()


@functools.lru_cache(maxsize=256)
def rounding_to(levels: tuple[float, ...]) -> Rounding:
    """Return the rule of rounding to these levels; cached.

    Raises:
        ValueError: unless levels are 2 to 256 numbers in ascending order from -1 to 1.
    """
    K, singles = len(levels), np.array(levels, np.float32)
    if not 2 <= K <= 256 or levels[0] != -1 or levels[-1] != 1 or not (singles[1:] > singles[:-1]).all():
        raise ValueError(f"levels must be 2 to 256 numbers in ascending order from -1 to 1, got {levels}")
    bits = random_bits(K)
    if np.abs(np.linspace(-1, 1, K) - levels).max() <= 2.0**-25:  # half the spacing of float32 numbers below 1
        return Rounding(K, "even", (K - 1) / 2, bits, Thresholds.between(levels, bits))
    if (singles == -singles[::-1]).all():
        central = None if K % 2 else Thresholds.between(levels[K // 2 - 1 : K // 2 + 1], bits)
        return Rounding(K, "symmetric", 1, bits, Thresholds.between(levels[K // 2 :], bits), central)
    return Rounding(K, "any", 1, bits, Thresholds.between(levels, bits))


def round_to_levels(x: Tensor, factor: Tensor, draws: Tensor, rounding: Rounding) -> Tensor:
    """Round coordinates to norm x level at random and unbiased; return codes, uint8 [..., N].

    Args:
        x: coordinates, float32 [..., N].
        factor: factor of the coordinates, see `block_numbers.level_factors`, float32 [..., 1].
        draws: random integers below 2^bits, int32 [..., N].
        rounding: rule of rounding.

    Source: Alistarh et al. 2017 (arXiv 1610.02132) for even grids; Faghri et al. 2020 (arXiv 2010.12460) for any.
    """
    r, v, K = x * factor, draws.float(), rounding.K
    if rounding.kind == "even":
        r.add_(rounding.scale).clamp_(0, 2 * rounding.scale).add_(v.mul_(2.0**-rounding.bits))
        return r.to(torch.uint8)
    if rounding.kind == "any":
        return count_below(r, v, rounding.intervals)
    positive = r > (rounding.central.at(0, v) if rounding.central else 0)
    code = count_below(r.abs_(), v, rounding.intervals).add_(K // 2)
    return torch.where(positive, code, K - 1 - code)


def count_below(r: Tensor, v: Tensor, intervals: Thresholds) -> Tensor:
    """Return the number of thresholds below each r, uint8."""
    if len(intervals.starts) > COUNTED:
        j, threshold = intervals.around(r, v)
        return (j + (r > threshold)).to(torch.uint8)
    return sum((r > intervals.at(j, v)).to(torch.uint8) for j in range(len(intervals.starts)))  # type: ignore[return-value]


@functools.lru_cache(maxsize=256)
def for_kernel(levels: tuple[float, ...]) -> kinds.KernelRounding:
    """Return `rounding_to(levels)` in the format of the kernels; cached."""
    own = rounding_to(levels)
    kind = {"even": kinds.EVEN, "symmetric": kinds.SYMMETRIC, "any": kinds.ANY}[own.kind]
    central = [] if own.central is None else [float(own.central.starts[0]), float(own.central.widths[0])]
    thresholds = own.intervals.starts.numpy(), own.intervals.widths.numpy(), np.array(central, np.float32)
    return kinds.KernelRounding(kind, own.K, own.bits, own.scale, *thresholds)
