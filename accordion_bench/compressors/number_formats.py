"""`int8`, `fp8`, `fp4` and `natural`: each coordinate as a short number, scaled per bucket, or as a power of two."""

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Context
from accordion_bench.codecs.coding import E3M0_MAGNITUDES, FORMATS, MANTISSA, Coding, finished
from accordion_bench.codecs.layout import in_blocks
from accordion_bench.compressors.dense import NONE_FITTED, Codebooks, DenseCodes
from accordion_bench.compressors.description import FEEDBACK, TRAVEL
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import TensorSpec

RANDOM_BITS = 24


def _variance(compressor: "Blockwise", x_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor | None:
    """Return E||C(v) - v||^2 of each row in closed form; None if rounding is not random."""
    if not compressor.traits.unbiased:
        return None
    size = compressor.blocks(spec)
    norms_R = torch.linalg.vector_norm(in_blocks(x_R.float(), size), math.inf, dim=2, dtype=torch.float64)
    scales_R = (
        finished(compressor.coding(level).rule, [norms_R], norms_R)[0]
        .double()
        .repeat_interleave(size, dim=1)[:, : spec.numel]
    )
    steps = torch.where(scales_R > 0, x_R.double() / scales_R, 0)
    return (scales_R.square() * (steps.ceil() - steps) * (steps - steps.floor())).sum(1)


@with_options
class Blockwise(DenseCodes):
    """C(v) = s_b round(v / s_b) on each bucket b, s_b = max |v_b| / the format's largest number.

    fp8: the relative error of an entry is at most 2^-4 (e4m3) or 2^-3 (e5m2), unless it is far below the bucket's
        maximum.
    int8: the error is at most s_b, or s_b / 2 with rounding to nearest; random rounding is unbiased.

    The message is a float32 scale per bucket, then the bytes. Source: Micikevicius et al. 2022 (arXiv 2209.05433);
    Dettmers 2016 (arXiv 1511.04561).
    """

    format: str = option(default="e4m3", choices=tuple(FORMATS))
    bucket_size: int | None = option(
        "coordinates that share one scale; null = a whole tensor", default=1024, at_least=1
    )
    rounding: str = option(
        "random: unbiased; nearest: faster, half the error, biased", default="nearest", choices=("nearest", "random")
    )

    chosen_as = {
        "fp8": Choice(
            "8-bit floats with a scale per bucket",
            beside=("collective", *FEEDBACK, *TRAVEL),
            leaves_out=("rounding",),
        ),
        "int8": Choice(
            "8-bit integers with a scale per bucket",
            {"format": "int8", "rounding": "random"},
            beside=("collective", *FEEDBACK, *TRAVEL),
        ),
    }

    description = replace(
        DenseCodes.description,
        kernels=("cpu", "cuda"),
        collective_reason="8-bit numbers with different scales cannot be summed",
        claims=replace(DenseCodes.description.claims, variance=_variance),
    )

    stream = "Blockwise"
    traits = replace(DenseCodes.traits, whole_model=True, replays=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding == "random" and self.format != "int8":
            raise ValueRefused("rounding", "nearest where format is not int8", self.rounding, "nearest")
        self.traits = replace(self.traits, unbiased=self.rounding == "random")

    def block_of(self, spec: TensorSpec) -> int | None:
        return self.bucket_size

    def coding(self, level: float, fitted: Codebooks = NONE_FITTED) -> Coding:
        return coding_of(self.format, self.traits.unbiased)


@functools.cache
def coding_of(format: str, at_random: bool) -> Coding:
    """Return the coding of a format that maps the bucket's largest magnitude to the format's largest number."""
    numbers = tuple(torch.arange(256, dtype=torch.uint8).view(FORMATS[format]).float().tolist())
    if at_random:
        return Coding(f"{format} at random", numbers, "linf", "largest", RANDOM_BITS, stream=Blockwise.stream)
    return Coding(format, numbers, "linf", "largest")


FP4_CODING = Coding("e3m0", (*E3M0_MAGNITUDES, *(-magnitude for magnitude in E3M0_MAGNITUDES)), "linf", "largest")


def _fp4_contraction(compressor: "FP4", spec: TensorSpec, level: float) -> float:
    """The maximum of a bucket is exact; each other entry loses at most v^2 / 9, or (s_b 2^-7)^2."""
    size = compressor.blocks(spec)
    return max(1 / size, 1 - 1 / 9 - (size - 1) * 2.0**-14)


@with_options
class FP4(DenseCodes):
    """C(v) = s_b round(v / s_b) on each bucket b, to the nearest of 0, +-2^-6, ..., +-2^0; s_b = max |v_b|.

    The format is E3M0: a sign, three bits of exponent, no mantissa. Ties are rounded to the even code: 2^-7 becomes 0,
    and of two powers of two the one with the even code is used. The relative error is at most a third; below 3/4 of the
    smallest magnitude, the absolute error is at most half of that magnitude. Each message has its own scales, so that
    decoded values are summed in float32.

    The message is a float32 scale per bucket, then two codes per byte. Source: Douillard et al. 2025, Streaming DiLoCo
    (arXiv 2501.18512), which sends outer gradients in E3M0.
    """

    bucket_size: int | None = option(
        "coordinates that share one scale; null = a whole tensor", default=1024, at_least=1
    )

    chosen_as = {
        "fp4": Choice(
            "4-bit floats (a sign and an exponent) with a scale per bucket", beside=("collective", *FEEDBACK, *TRAVEL)
        )
    }

    description = replace(
        DenseCodes.description,
        display_names={"fp4": "fp4"},
        kernels=("cpu", "cuda"),
        collective_reason="4-bit numbers with different scales cannot be summed",
        claims=replace(DenseCodes.description.claims, contraction=_fp4_contraction),
    )

    stream = "FP4"
    traits = replace(DenseCodes.traits, whole_model=True, replays=True)

    def block_of(self, spec: TensorSpec) -> int | None:
        return self.bucket_size

    def coding(self, level: float, fitted: Codebooks = NONE_FITTED) -> Coding:
        return FP4_CODING


def _natural_variance(compressor: "Natural", x_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
    """Return E||C(v) - v||^2 of each row: sum_i (2^(e+1) - |v_i|)(|v_i| - 2^e)."""
    size = x_R.abs().double()
    low = torch.where(size > 0, 2.0 ** torch.floor(torch.log2(size.clamp_min(1e-300))), 0)
    return ((2 * low - size) * (size - low)).sum(1)


@with_options
class Natural(DenseCodes):
    """C(v)_i = sgn(v_i) 2^e or 2^(e+1), 2^e <= |v_i| < 2^(e+1), up with probability |v_i| / 2^e - 1.

    Unbiased; E||C(v) - v||^2 <= ||v||^2 / 8, with equality at |v_i| / 2^e = 4/3. Rounding adds 23 random bits to the
    float's mantissa: a carry rounds up.

    With 7 exponent bits, powers range from 2^-63 to 2^63: smaller entries are rounded at random to 0 or 2^-63 (still
    unbiased), and larger entries are clamped.

    The message is all exponents, then all sign bits: 9 (or 8) bits per coordinate. Source: Horvath et al. 2019
    (arXiv 1905.10988).
    """

    exponent_bits: int = option("8: 9 bits per coordinate; 7: 8 bits", default=8, choices=(7, 8))

    chosen_as = {
        "natural": Choice(
            "random rounding to powers of two (Horvath et al. 2019)",
            beside=("collective", *FEEDBACK, *TRAVEL),
            comments={"error_feedback": "false: unbiased, needs none; true; ef21, loco: other forms"},
        )
    }

    description = replace(
        DenseCodes.description,
        display_names={"natural": "natural compression"},
        kernels=("cpu", "cuda"),
        collective_reason="a sum of powers of two is not a power of two",
        claims=replace(DenseCodes.description.claims, variance=_natural_variance),
    )

    stream = "Natural"
    traits = replace(DenseCodes.traits, whole_model=True, unbiased=True, contracts=True, replays=True)

    def coding(self, level: float, fitted: Codebooks = NONE_FITTED) -> Coding:
        return powers_of_two(self.exponent_bits)


@functools.cache
def powers_of_two(exponent_bits: int) -> Coding:
    """Return the coding into powers of two with the given number of exponent bits, and signs; code 0 represents 0."""
    exponents = torch.arange(1 << exponent_bits, dtype=torch.int32)
    if exponent_bits == 7:
        exponents = torch.where(exponents > 0, exponents + 63, 0)
    powers = tuple((exponents << MANTISSA).view(torch.float32).tolist())
    return Coding("power", powers, bits=MANTISSA, signs=True, stream=Natural.stream)
