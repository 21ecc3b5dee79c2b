"""Stochastic rounding: coordinates as random codes of the levels around them, see `thresholds`."""

import functools

import numpy as np
import torch
from torch import Tensor

from accordion_bench.compressors.rounding.thresholds import Rounding, Thresholds, rounding_to
from accordion_bench.tensors.kernels import on_gpu
from accordion_bench.tensors.kernels import rounding as kinds

COUNTED = 2  # up to so many thresholds, each is compared with in turn; beyond, a binary search is faster


def round_to_levels(x: Tensor, factor: Tensor, draws: Tensor, rounding: Rounding) -> Tensor:
    """Codes of coordinates, rounded to norm x level at random without bias: uint8 [..., N].

    Args:
        x: coordinates, float32 [..., N].
        factor: what they are multiplied by, see `factors`, float32 [..., 1].
        draws: random integers below 2^bits, int32 [..., N].
        rounding: to which levels.

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


def factors(norms: Tensor, scale: float) -> Tensor:
    """scale / norm, rounded up where else a coordinate as large as its norm would end below `scale`, its level."""
    if on_gpu.usable([norms]):
        from accordion_bench.tensors.kernels.on_gpu import factors as kernel

        return kernel.factors(norms, scale)
    exact, above = (torch.tensor(s) for s in (scale, np.nextafter(np.float32(scale), np.inf)))
    quotients = torch.div(exact, norms)
    quotients = torch.where(norms * quotients < exact, torch.div(above, norms), quotients)
    return quotients.clamp_max_(torch.finfo(torch.float32).max)  # finite for norm 0: 0 times this is 0


def count_below(r: Tensor, v: Tensor, intervals: Thresholds) -> Tensor:
    """How many thresholds lie below each r, uint8."""
    if len(intervals.starts) > COUNTED:
        j, threshold = intervals.around(r, v)
        return (j + (r > threshold)).to(torch.uint8)
    return sum((r > intervals.at(j, v)).to(torch.uint8) for j in range(len(intervals.starts)))  # type: ignore[return-value]


@functools.lru_cache(maxsize=256)
def for_kernel(levels: tuple[float, ...]) -> kinds.Rounding:
    """`rounding_to` these levels, as kernels are told."""
    own = rounding_to(levels)
    kind = {"even": kinds.EVEN, "symmetric": kinds.SYMMETRIC, "any": kinds.ANY}[own.kind]
    central = [] if own.central is None else [float(own.central.starts[0]), float(own.central.widths[0])]
    thresholds = own.intervals.starts.numpy(), own.intervals.widths.numpy(), np.array(central, np.float32)
    return kinds.Rounding(kind, own.K, own.bits, own.scale, *thresholds)
