"""Coding: description of a dense code, that is a scale per block and a code per coordinate.

The description is data, so that a compiled kernel can do all of it in one pass.
"""

import functools
import math
from dataclasses import dataclass

from accordion_bench.codecs.block_numbers import MEANS
from accordion_bench.codecs.rounding import for_kernel, random_bits, rounding_to
from accordion_bench.tensors.kernels import rounding as kinds
from accordion_bench.tensors.kernels.dense_kernels import BlockRule
from accordion_bench.tensors.kernels.rounding import KernelRounding

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
    """Return the rounding in the format of the kernels."""
    if coding.rounding == LEVELS:
        return for_kernel(coding.values)
    return KernelRounding(KINDS[coding.rounding], coding.kinds, coding.bits)
