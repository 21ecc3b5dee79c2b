"""fp8 and int8: eight bits per coordinate with a scale per bucket."""

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Context
from accordion_bench.codecs.coding import FORMATS, Coding, finished
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
