"""Coding: description of a dense code, that is numbers per block (scale, factor, means) and a code per coordinate.

The description is data, so that a compiled kernel can do all of it in one pass. Kernels compute the numbers of blocks
together with their norms; the results equal those of this module bit for bit.

Tensor suffixes: S senders or local workers, M blocks of all tensors.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from accordion_bench.codecs.rounding import random_bits, round_to_levels, rounding_to
from accordion_bench.tensors.kernels import dense_kernels as kinds
from accordion_bench.tensors.kernels.dense_kernels import BlockRule, KernelRounding
from accordion_bench.tensors.upload import table

MANTISSA = 23  # bits of a float32
LEVELS = "levels"
SIGNS = (1.0, -1.0)  # values of codes 0 and 1
KINDS = {
    "sign": kinds.SIGNS,
    "power": kinds.POWERS,
    "e4m3": kinds.E4M3,
    "e5m2": kinds.E5M2,
    "e3m0": kinds.E3M0,
    "int8": kinds.INTEGER,
    "int8 at random": kinds.RANDOM_INTEGER,
}
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
E3M0_MAGNITUDES = (0.0, *(2.0**exponent for exponent in range(-6, 1)))
E3M0_SIGN = 3  # position of the sign bit
ORDERS = {"l1": 1, "l2": 2, "linf": math.inf}
LARGEST_SUBNORMAL = 2.0**-126 - 2.0**-149
ROUNDING = 1e-15  # bound of the relative rounding error of a float64 sum of squares, per term
MEANS = BlockRule("means", ("sum", "below", "count"))
LARGEST = BlockRule("scale", ("linf",))


@dataclass(frozen=True)
class Coding:
    """Scale and codes of a block; decoded value = scale x value of the code (x sign).

    Args:
        rounding: function from a scaled coordinate to its code. `levels`: one of the two nearest values, at random and
            unbiased; `sign`; `power`: one of the two nearest powers of two, at random; `e4m3`, `e5m2`, `e3m0`, `int8`:
            nearest number of that format; `int8 at random`.
        values: value of each code before scaling [K].
        norm: norm of a block that determines its scale: `l1`, `l2`, `linf`; "" = messages contain no scales. `means`:
            codes are signs, and a sign decodes to the mean of the coordinates with that sign.
        scale: `norm`: the norm; `mean`: norm / n for n coordinates; `root mean`: norm / sqrt(n); `largest`: norm /
            largest value of a code, or 0 if that is not a normal float32.
        bits: random bits per coordinate; 0 = deterministic.
        signs: whether the signs of coordinates are a second stream of codes.
        stream: name of the random stream, see `Bucket.keys`.
    """

    rounding: str
    values: tuple[float, ...]
    norm: str = ""
    scale: str = "norm"
    bits: int = 0
    signs: bool = False
    stream: str = ""

    @property
    def kinds(self) -> int:
        """K, number of codes."""
        return len(self.values)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields of a message, in order: numbers of blocks, then streams of codes."""
        numbers = {"": (), "means": ("middles", "halves")}.get(self.norm, ("scales",))
        return (*numbers, "codes", *(("signs",) if self.signs else ()))

    @functools.cached_property
    def largest(self) -> float:
        """Largest finite value of a code; some formats have codes for infinity and NaN."""
        return max(value for value in self.values if math.isfinite(value))

    @functools.cached_property
    def rule(self) -> BlockRule:
        """Rule from norms to scales and factors; without norms if messages contain no scales."""
        if self.norm == "means":
            return MEANS
        norms, over = (self.norm,) if self.norm else (), {"norm": "", "mean": "n", "root mean": "root n"}
        own = BlockRule("scale", norms, over.get(self.scale, self.scale), self.largest)
        if self.rounding == LEVELS:
            return own._replace(factor="levels", top=rounding_to(self.values).scale)
        return own._replace(factor="inverse") if self.norm and self.rounding != "sign" else own


def to_levels(levels: tuple[float, ...], norm: str = "", stream: str = "") -> Coding:
    """Return the coding of coordinates / norm of their block, rounded at random to levels in [-1, 1]."""
    return Coding(LEVELS, levels, norm, bits=random_bits(len(levels)), stream=stream)


@functools.lru_cache(maxsize=256)
def kernel_rounding(coding: Coding) -> KernelRounding:
    """Return the rule of rounding of a coding; cached."""
    if coding.rounding == LEVELS:
        return rounding_to(coding.values)
    return KernelRounding(KINDS[coding.rounding], coding.kinds, coding.bits)


def codes_of(x: Tensor, factor: Tensor | None, draws: Tensor | None, coding: Coding) -> Tensor:
    """Return the codes of coordinates, uint8 [..., N].

    Args:
        x: coordinates, float32 [..., N].
        factor: factors of the blocks, float32 [..., 1]; None = 1.
        draws: random integers below 2^bits, int32 [..., N]; None for deterministic codings.
        coding: description of the codes.
    """
    if coding.rounding == "sign":
        return (x < 0).to(torch.uint8)
    if coding.rounding == "power":
        assert draws is not None
        return _powers(x.abs(), draws, coding.kinds)
    assert factor is not None
    if coding.rounding == LEVELS:
        assert draws is not None
        return round_to_levels(x, factor, draws, rounding_to(coding.values))
    steps = x * factor
    if coding.rounding == "e3m0":
        codes = torch.bucketize(steps.abs(), e3m0_borders(x.device), out_int32=True).to(torch.uint8)
        return codes | steps.signbit().to(torch.uint8) << E3M0_SIGN
    if draws is not None:
        steps = steps.add_(draws.float().mul_(2.0**-coding.bits)).floor_().clamp_(-127, 127)
    elif coding.rounding == "int8":
        steps = steps.round_()
    return steps.to(FORMATS[coding.rounding.removesuffix(" at random")]).view(torch.uint8)


def _powers(magnitude: Tensor, draws: Tensor, kinds: int) -> Tensor:
    """Return exponents of powers of two, plus one if mantissa + draw carries; with 128 kinds from 2^-63 to 2^63."""
    exponents = (magnitude.view(torch.int32) + draws).bitwise_right_shift_(MANTISSA)
    if kinds == 256:
        return exponents.clamp_max_(254).to(torch.uint8)
    below = draws < magnitude * 2.0 ** (63 + MANTISSA)  # magnitudes below 2^-63 become 2^-63 or 0
    return torch.where(magnitude < 2.0**-63, below.int(), exponents.sub_(63).clamp_max_(127)).to(torch.uint8)


@functools.lru_cache(maxsize=8)
def e3m0_borders(device: torch.device) -> Tensor:
    """Return the borders between adjacent magnitudes, such that ties go to the even code.

    A magnitude equal to a border gets the lower code, so borders above odd codes are reduced by one ulp.
    """
    magnitudes = torch.tensor(E3M0_MAGNITUDES)
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    odd = torch.arange(len(middles)) % 2 == 1
    return table(torch.where(odd, torch.nextafter(middles, torch.tensor(0.0)), middles), device)


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
    """Return the numbers that a rule derives from the norms that it requires, float64 [S, M] each.

    Args:
        rule, norms: rule, and its norms in order.
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

    The mean of no coordinates is 0. Results are float32 [S, M] each.

    Args:
        total, below, count: sums of all and of the negative coordinates, and number of the negative ones, [S, M].
        entries: number of coordinates of each block, float64 [M].
    """
    high, low = (total - below).clamp_min(0) / (entries - count).clamp_min(1), below / count.clamp_min(1)
    return [((high + low) / 2).float(), ((high - low) / 2).float()]


def clipped(largest: Tensor, norm: Tensor, total: Tensor, entries: Tensor, clip: float) -> Tensor:
    """Return the largest magnitude of each block, clipped at `clip` standard deviations, float32 [S, M].

    Deviations are over n - 1. Blocks of equal entries have no deviation and are not clipped.

    Args:
        largest, norm, total: largest magnitude, l2 norm and sum of each block, float64 [S, M].
        entries: number of coordinates of each block, float64 [M].
    """
    square, constant = norm.square(), total.square() / entries
    sigma = ((square - constant).clamp_min(0) / (entries - 1).clamp_min(1)).sqrt()
    varied = constant < (1 - ROUNDING * (entries + 9)) * square
    return torch.where(varied, torch.minimum(largest, clip * sigma), largest).float()


def norms_of(cells: Sequence[Tensor], kind: str) -> Tensor:
    """Return the norms of blocks [W, m, size] of all tensors, float64 [W, M]."""
    if kind in ORDERS:
        found = [torch.linalg.vector_norm(x_W, ORDERS[kind], dim=2, dtype=torch.float64) for x_W in cells]
    elif kind == "count":
        found = [(x_W < 0).sum(2, dtype=torch.float64) for x_W in cells]
    else:
        below = kind == "below"
        found = [(x_W.clamp_max(0) if below else x_W).sum(2, dtype=torch.float64) for x_W in cells]
    return torch.cat(found, dim=1)
