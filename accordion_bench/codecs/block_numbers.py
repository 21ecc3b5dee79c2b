"""What norms of a block become before its coordinates are encoded: scales and factors, means, clipped magnitudes.

Kernels finish norms by themselves, so that no number of a block takes an operation of its own; they know the rule as
data, see `BlockRule`, and compute to the bit what is here.

Tensor suffixes: S senders or local workers, M blocks of all tensors.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.kernels.dense_kernels import BlockRule

LARGEST_SUBNORMAL = 2.0**-126 - 2.0**-149
ROUNDING = 1e-15  # share of a sum of squares in float64, for each of its terms, that may be rounding
MEANS = BlockRule("means", ("sum", "below", "count"))
LARGEST = BlockRule("scale", ("linf",))


class BlockNumbers(NamedTuple):
    """Numbers of blocks, for an encoder.

    scales: written into the header of a coding, float32 [W, M]; None = there is none.
    factors: what coordinates are multiplied by, float32 [W or 1, M]; None = 1.
    middles: written into their field, float32 [W, M]; None = there is none.
    """

    scales: Tensor | None = None
    factors: Tensor | None = None
    middles: Tensor | None = None


def finished(rule: BlockRule, norms: Sequence[Tensor], entries: Tensor) -> list[Tensor]:
    """What a rule makes of norms.

    Args:
        rule: which.
        norms: those that it names, float64 [S, M] each.
        entries: coordinates of each block, float64 [M].

    Returns:
        float32 [S, M] each: the scale, with the factor where the rule has one; middle and half; the largest magnitude.
    """
    if rule.kind == "means":
        total, below, count = norms
        return middle_and_half(total, below, count, entries)
    if rule.kind == "largest":
        largest, norm, total = norms
        return [clipped(largest, norm, total, entries, rule.clip)]
    scales = _scales(rule, norms[0], entries)
    return [scales, factors_of(rule, scales)] if rule.factor else [scales]


def _scales(rule: BlockRule, norms: Tensor, entries: Tensor) -> Tensor:
    if rule.over == "n":
        return (norms / entries).float()
    if rule.over == "root n":
        return (norms / entries.sqrt()).float()
    if rule.over == "largest":
        # divided in float64: a GPU multiplies by the inverse of a number of the host, which rounds twice
        scales = norms.float() if rule.largest == 1 else (norms / rule.largest).float()
        return torch.threshold(scales, LARGEST_SUBNORMAL, 0.0)
    return norms.float()


def factors_of(rule: BlockRule, scales: Tensor) -> Tensor:
    """What coordinates are multiplied by before rounding, of the shape of their scales."""
    if rule.factor == "levels":
        return level_factors(scales, rule.top)
    return scales.reciprocal().nan_to_num_(nan=0.0, posinf=0.0)


def level_factors(norms: Tensor, top: float) -> Tensor:
    """top / norm, rounded up where else a coordinate as large as its norm would end below `top`, its level."""
    # as tensors, because torch divides a number by its reciprocal
    exact, above = (norms.new_full((), float(s)) for s in (top, np.nextafter(np.float32(top), np.inf)))
    quotients = torch.div(exact, norms)
    quotients = torch.where(norms * quotients < exact, torch.div(above, norms), quotients)
    return quotients.clamp_max_(torch.finfo(torch.float32).max)  # finite for norm 0: 0 times this is 0


def middle_and_half(total: Tensor, below: Tensor, count: Tensor, entries: Tensor) -> list[Tensor]:
    """The means of the non-negative and of the negative coordinates of blocks, as middle + half and middle - half.

    Args:
        total, below: sums of all coordinates, and of the negative ones, float64 [S, M].
        count: how many are negative.
        entries: coordinates of each block, float64 [M].

    Returns:
        float32 [S, M] each; the mean of no coordinates is 0.
    """
    high, low = (total - below).clamp_min(0) / (entries - count).clamp_min(1), below / count.clamp_min(1)
    return [((high + low) / 2).float(), ((high - low) / 2).float()]


def clipped(largest: Tensor, norm: Tensor, total: Tensor, entries: Tensor, clip: float) -> Tensor:
    """The largest magnitude of blocks, but at most so many standard deviations, float32 [S, M].

    Entries that are alike have no deviation: nothing sticks out, nothing is cut.

    Args:
        largest, norm, total: largest magnitude, l2 norm and sum of each block, float64 [S, M].
        entries: coordinates of each block, float64 [M].
        clip: standard deviations, over n - 1.
    """
    square, constant = norm.square(), total.square() / entries
    sigma = ((square - constant).clamp_min(0) / (entries - 1).clamp_min(1)).sqrt()
    varied = constant < (1 - ROUNDING * (entries + 9)) * square
    return torch.where(varied, torch.minimum(largest, clip * sigma), largest).float()
