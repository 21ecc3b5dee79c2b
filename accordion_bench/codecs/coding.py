"""Coding: how coordinates become a scale for each block and a code for each coordinate, as data.

Data, because a kernel then knows all of it beforehand and can do it in one pass.
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
SIGNS = (1.0, -1.0)  # of codes 0 and 1
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
    """How the coordinates of a block become a scale and codes; value = scale x value of the code (x sign).

    Args:
        rounding: how a coordinate over its scale becomes a code. `levels`: one of the two nearest values, at random and
            without bias; `sign`; `power`: one of the two nearest powers of two, at random; `e4m3`, `e5m2`, `e3m0`,
            `int8`: the nearest number of that format; `int8 at random`.
        values: what each code stands for, before scaling [K].
        norm: of a block, from which its scale comes: `l1`, `l2`, `linf`; "" = messages have no scales. `means`: codes
            are signs, which stand for the mean of the coordinates of that sign.
        scale: how the scale comes from the norm. `norm`: as it is; `mean`: over the number n of coordinates; `root
            mean`: over sqrt(n); `largest`: over the largest value of a code, and a block whose scale would be no
            normal float32 counts as zero.
        bits: random bits for each coordinate; 0 = nothing is drawn.
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
        """K, how many codes there are."""
        return len(self.values)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a message, in order: numbers of blocks, then a code for each coordinate in each stream."""
        numbers = {"": (), "means": ("middles", "halves")}.get(self.norm, ("scales",))
        return (*numbers, "codes", *(("signs",) if self.signs else ()))

    @functools.cached_property
    def largest(self) -> float:
        """The largest number that a code stands for; some formats have codes for infinity and NaN."""
        return max(value for value in self.values if math.isfinite(value))

    @functools.cached_property
    def rule(self) -> BlockRule:
        """How norms become scales and factors; without norms where messages have no scales."""
        if self.norm == "means":
            return MEANS
        norms, over = (self.norm,) if self.norm else (), {"norm": "", "mean": "n", "root mean": "root n"}
        own = BlockRule("scale", norms, over.get(self.scale, self.scale), self.largest)
        if self.rounding == LEVELS:
            return own._replace(factor="levels", top=rounding_to(self.values).scale)
        return own._replace(factor="inverse") if self.norm and self.rounding != "sign" else own


def to_levels(levels: tuple[float, ...], norm: str = "", stream: str = "") -> Coding:
    """Coordinates over the norm of their block, rounded at random to levels from -1 to 1."""
    return Coding(LEVELS, levels, norm, bits=random_bits(len(levels)), stream=stream)


@functools.lru_cache(maxsize=256)
def kernel_rounding(coding: Coding) -> KernelRounding:
    """The rounding as kernels are told."""
    if coding.rounding == LEVELS:
        return for_kernel(coding.values)
    return KernelRounding(KINDS[coding.rounding], coding.kinds, coding.bits)
