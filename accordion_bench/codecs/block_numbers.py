"""Numbers derived from the norms of a block: scales and factors, means, clipped magnitudes.

Kernels compute these numbers together with the norms, so that they cost no further launch. A kernel receives the rule
as data, see `BlockRule`, and its results equal those of this module bit for bit.

Tensor suffixes: S senders or local workers, M blocks of all tensors.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.kernels.dense_kernels import BlockRule

LARGEST_SUBNORMAL = 2.0**-126 - 2.0**-149
ROUNDING = 1e-15  # bound of the relative rounding error of a float64 sum of squares, per term
MEANS = BlockRule("means", ("sum", "below", "count"))
LARGEST = BlockRule("scale", ("linf",))


class BlockNumbers(NamedTuple):
    """Numbers of blocks for an encoder.

    scales: content of the field `header_of(coding)`, float32 [W, M]; None = no such field.
    factors: factors of the coordinates, float32 [W or 1, M]; None = 1.
    middles: content of the field `middles`, float32 [W, M]; None = no such field.
    """

    scales: Tensor | None = None
    factors: Tensor | None = None
    middles: Tensor | None = None


def finished(rule: BlockRule, norms: Sequence[Tensor], entries: Tensor) -> list[Tensor]:
    """Return the numbers that a rule derives from norms.

    Args:
        rule: rule.
        norms: norms that the rule requires, float64 [S, M] each.
        entries: number of coordinates of each block, float64 [M].

    Returns:
        float32 [S, M] each: scale, and factor if the rule has one; or middle and half; or the largest magnitude.
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
        # in float64, because a GPU divides by a Python number as a product with its inverse, which rounds twice
        scales = norms.float() if rule.largest == 1 else (norms / rule.largest).float()
        return torch.threshold(scales, LARGEST_SUBNORMAL, 0.0)
    return norms.float()


def factors_of(rule: BlockRule, scales: Tensor) -> Tensor:
    """Return the factors of coordinates before rounding, with the shape of the scales."""
    if rule.factor == "levels":
        return level_factors(scales, rule.top)
    return scales.reciprocal().nan_to_num_(nan=0.0, posinf=0.0)


def level_factors(norms: Tensor, top: float) -> Tensor:
    """Return top / norm, rounded up if otherwise a coordinate equal to its norm would be below `top`."""
    # tensors, because torch divides by a Python number as a product with its reciprocal
    exact, above = (norms.new_full((), float(s)) for s in (top, np.nextafter(np.float32(top), np.inf)))
    quotients = torch.div(exact, norms)
    quotients = torch.where(norms * quotients < exact, torch.div(above, norms), quotients)
    return quotients.clamp_max_(torch.finfo(torch.float32).max)  # finite for norm 0: 0 times this is 0


def middle_and_half(total: Tensor, below: Tensor, count: Tensor, entries: Tensor) -> list[Tensor]:
    """Return the means of non-negative and negative coordinates of blocks, as middle + half and middle - half.

    Args:
        total, below: sums of all and of the negative coordinates, float64 [S, M].
        count: number of negative coordinates, float64 [S, M].
        entries: number of coordinates of each block, float64 [M].

    Returns:
        float32 [S, M] each; the mean of no coordinates is 0.
    """
    high, low = (total - below).clamp_min(0) / (entries - count).clamp_min(1), below / count.clamp_min(1)
    return [((high + low) / 2).float(), ((high - low) / 2).float()]


def clipped(largest: Tensor, norm: Tensor, total: Tensor, entries: Tensor, clip: float) -> Tensor:
    """Return the largest magnitude of each block, clipped at `clip` standard deviations, float32 [S, M].

    Blocks of equal entries have no deviation and are not clipped.

    Args:
        largest, norm, total: largest magnitude, l2 norm and sum of each block, float64 [S, M].
        entries: number of coordinates of each block, float64 [M].
        clip: number of standard deviations (over n - 1).
    """
    square, constant = norm.square(), total.square() / entries
    sigma = ((square - constant).clamp_min(0) / (entries - 1).clamp_min(1)).sqrt()
    varied = constant < (1 - ROUNDING * (entries + 9)) * square
    return torch.where(varied, torch.minimum(largest, clip * sigma), largest).float()
