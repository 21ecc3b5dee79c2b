"""Coding: description of a dense code, that is numbers per block (scale, factor, means) and a code per coordinate.

The description is data, so that a compiled kernel can do all of it in one pass. Kernels compute the numbers of blocks
together with their norms; the results equal those of this module bit for bit.

Tensor suffixes: S senders or local workers, M blocks of all tensors.

Stochastic rounding to the levels of a codebook compares coordinates with random thresholds.

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
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from accordion_bench.tensors.kernels import dense_kernels as kinds
from accordion_bench.tensors.kernels.dense_kernels import ANY, EVEN, SYMMETRIC, BlockRule, KernelRounding
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
