"""Eight bits per coordinate with a scale per bucket: fp8 and int8."""

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.codecs.block_numbers import finished
from accordion_bench.codecs.bucket import Context
from accordion_bench.codecs.coding import Coding
from accordion_bench.codecs.reference import FORMATS, in_blocks
from accordion_bench.compressors.dense import NONE_FITTED, Codebooks, DenseCodes
from accordion_bench.options import checks
from accordion_bench.plan import TensorSpec

RANDOM_BITS = 24


def _variance(compressor: "Blockwise", x_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor | None:
    """E||C(v) - v||^2 of each row, the closed form, where rounding is random."""
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


class Blockwise(DenseCodes):
    """C(v) = s_b round(v / s_b) on each bucket b, s_b = max |v_b| / the format's largest number.

    fp8: an entry is off by at most 2^-4 (e4m3) or 2^-3 (e5m2) of itself, unless it is far below the bucket's largest.
    int8: by at most s_b, or s_b / 2 rounded to nearest; rounded at random it is unbiased.

    Args:
        format: `e4m3`, largest number 448; `e5m2`, 57,344; `int8`, 127.
        bucket_size: consecutive coordinates that share one scale; smaller = more bytes. null = a whole tensor.
        rounding: `nearest`; `random`, for int8 only.

    The message is a float32 scale per bucket, then the bytes. Source: Micikevicius et al. 2022 (arXiv 2209.05433);
    Dettmers 2016 (arXiv 1511.04561).
    """

    description = replace(
        DenseCodes.description,
        kernels=("cpu", "cuda"),
        collective_reason="8-bit numbers with different scales do not add up",
        claims=replace(DenseCodes.description.claims, variance=_variance),
    )

    stream = "Blockwise"
    traits = replace(DenseCodes.traits, whole_model=True, replays=True)

    def __init__(self, format: str = "e4m3", bucket_size: int | None = 1024, rounding: str = "nearest") -> None:
        self.format = checks.choice("format", format, list(FORMATS))
        self.bucket_size = None if bucket_size is None else checks.integer("bucket_size", bucket_size, at_least=1)
        self.rounding = checks.choice("rounding", rounding, ["nearest", "random"])
        if rounding == "random" and format != "int8":
            raise checks.ValueRefused("rounding", "nearest where format is not int8", rounding, "nearest")
        self.traits = replace(self.traits, unbiased=rounding == "random")

    def block_size(self, spec: TensorSpec) -> int | None:
        return self.bucket_size

    def coding(self, level: float, fitted: Codebooks = NONE_FITTED) -> Coding:
        return coding_of(self.format, self.traits.unbiased)


@functools.cache
def coding_of(format: str, at_random: bool) -> Coding:
    """The numbers of a format, with the bucket's largest magnitude as the largest of them."""
    if at_random:
        return Coding(
            f"{format} at random", numbers_of(format), "linf", "largest", RANDOM_BITS, stream=Blockwise.stream
        )
    return Coding(format, numbers_of(format), "linf", "largest")


@functools.cache
def numbers_of(format: str) -> tuple[float, ...]:
    """What each byte stands for."""
    return tuple(torch.arange(256, dtype=torch.uint8).view(FORMATS[format]).float().tolist())
