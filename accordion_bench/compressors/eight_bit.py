"""Eight bits per coordinate with a scale per bucket: fp8 and int8."""

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.compressors.base import Context
from accordion_bench.compressors.dense_codes import DenseCodes, Form, in_buckets
from accordion_bench.compressors.oneshot import OneShot
from accordion_bench.options import checks
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.kernels.rounding import E4M3, E5M2, INTEGER, RANDOM_INTEGER, Rounding

RANDOM_BITS = 24
LARGEST_SUBNORMAL = 2.0**-126 - 2.0**-149
TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}


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

    traits = replace(
        OneShot.traits,
        kernels=("cpu", "cuda"),
        whole_model=True,
        collective_reason="8-bit numbers with different scales do not add up",
    )

    def __init__(self, format: str = "e4m3", bucket_size: int | None = 1024, rounding: str = "nearest") -> None:
        self.format = checks.choice("format", format, list(TYPES))
        self.bucket_size = None if bucket_size is None else checks.integer("bucket_size", bucket_size, at_least=1)
        self.rounding = checks.choice("rounding", rounding, ["nearest", "random"])
        if rounding == "random" and format != "int8":
            raise checks.ValueRefused("rounding", "nearest where format is not int8", rounding, "nearest")
        self.traits = replace(self.traits, unbiased=rounding == "random", replays=rounding == "nearest")

    def variance(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor | None:
        """E||C(v) - v||^2 of each row, the closed form, where rounding is random."""
        if not self.traits.unbiased:
            return None
        size = self.form(level).size(spec.numel)
        norms_R = torch.linalg.vector_norm(in_buckets(x_R.float(), size), math.inf, dim=2, dtype=torch.float64)
        scales_R = self.scales(norms_R, norms_R).double().repeat_interleave(size, dim=1)[:, : spec.numel]
        steps = torch.where(scales_R > 0, x_R.double() / scales_R, 0)
        return (scales_R.square() * (steps.ceil() - steps) * (steps - steps.floor())).sum(1)

    def form(self, level: float) -> Form:
        return Form((256,), self.bucket_size, "linf", RANDOM_BITS if self.traits.unbiased else 0)

    def scales(self, norms: Tensor, entries: Tensor) -> Tensor:
        """A bucket whose s_b would be no normal float32 counts as zero."""
        scales = norms.float() / LARGEST[self.format]
        return torch.threshold(scales, LARGEST_SUBNORMAL, 0.0)

    def factors(self, scales: Tensor, level: float, ctx: Context) -> Tensor:
        return scales.reciprocal().nan_to_num_(nan=0.0, posinf=0.0)

    def codes(self, x: Tensor, factor: Tensor | None, draws: Tensor | None, level: float, ctx: Context) -> list[Tensor]:
        assert factor is not None
        steps = x * factor
        if draws is not None:
            steps = steps.add_(draws.float().mul_(2.0**-RANDOM_BITS)).floor_().clamp_(-127, 127)
        elif self.format == "int8":
            steps = steps.round_()
        return [steps.to(TYPES[self.format]).view(torch.uint8)]

    def kernel_rounding(self, level: float, ctx: Context) -> Rounding:
        if self.traits.unbiased:
            return Rounding(RANDOM_INTEGER, 256, RANDOM_BITS)
        kinds = {"int8": INTEGER, "e4m3": E4M3, "e5m2": E5M2}
        return Rounding(kinds[self.format], 256)

    def values(self, level: float, ctx: Context) -> list[tuple[float, ...]]:
        return [numbers_of(self.format)]


@functools.cache
def numbers_of(format: str) -> tuple[float, ...]:
    """What each byte stands for."""
    return tuple(torch.arange(256, dtype=torch.uint8).view(TYPES[format]).float().tolist())
