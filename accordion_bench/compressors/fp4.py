"""fp4: four-bit floats, a sign and an exponent, with a scale per bucket."""

import functools
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.compressors.base import Context
from accordion_bench.compressors.dense_codes import DenseCodes, Form
from accordion_bench.compressors.eight_bit import LARGEST_SUBNORMAL
from accordion_bench.compressors.oneshot import OneShot
from accordion_bench.options import checks
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.kernels.rounding import E3M0, Rounding
from accordion_bench.tensors.upload import table

MAGNITUDES = (0.0, *(2.0**exponent for exponent in range(-6, 1)))
SIGN = 3  # its bit


class FP4(DenseCodes):
    """C(v) = s_b round(v / s_b) on each bucket b, to the nearest of 0, +-2^-6, ..., +-2^0; s_b = max |v_b|.

    The format is E3M0: a sign, three bits of exponent, no mantissa. A tie goes to the even code: 2^-7 becomes 0, and of
    two powers of two the one whose code is even. An entry is off by at most a third of itself, unless it is below 3/4
    of the smallest magnitude: then by at most half of that. Each message has scales of its own, so that decoded
    values are added up, in float32.

    Args:
        bucket_size: consecutive coordinates that share one scale; smaller = more bytes. null = a whole tensor.

    The message is a float32 scale per bucket, then two codes in each byte. Source: Douillard et al. 2025, Streaming
    DiLoCo (arXiv 2501.18512), whose outer gradients travel in E3M0.
    """

    spelled = {"fp4": "fp4"}
    traits = replace(
        OneShot.traits,
        kernels=("cpu", "cuda"),
        whole_model=True,
        replays=True,
        collective_reason="4-bit numbers with different scales do not add up",
    )

    def __init__(self, bucket_size: int | None = 1024) -> None:
        self.bucket_size = None if bucket_size is None else checks.integer("bucket_size", bucket_size, at_least=1)

    def contraction(self, spec: TensorSpec, level: float) -> float:
        """The largest of a bucket comes back; each other entry loses v^2 / 9 at most, or (s_b 2^-7)^2."""
        size = self.form(level).size(spec.numel)
        return max(1 / size, 1 - 1 / 9 - (size - 1) * 2.0**-14)

    def form(self, level: float) -> Form:
        return Form((2 * len(MAGNITUDES),), self.bucket_size, "linf")

    def scales(self, norms: Tensor, entries: Tensor) -> Tensor:
        """A bucket whose s_b would be no normal float32 counts as zero."""
        return torch.threshold(norms.float(), LARGEST_SUBNORMAL, 0.0)

    def factors(self, scales: Tensor, level: float, ctx: Context) -> Tensor:
        return scales.reciprocal().nan_to_num_(nan=0.0, posinf=0.0)

    def codes(self, x: Tensor, factor: Tensor | None, draws: Tensor | None, level: float, ctx: Context) -> list[Tensor]:
        assert factor is not None
        steps = x * factor
        codes = torch.bucketize(steps.abs(), borders_on(x.device), out_int32=True).to(torch.uint8)
        return [codes | steps.signbit().to(torch.uint8) << SIGN]

    def kernel_rounding(self, level: float, ctx: Context) -> Rounding:
        return Rounding(E3M0, 2 * len(MAGNITUDES))

    def values(self, level: float, ctx: Context) -> list[tuple[float, ...]]:
        return [(*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES))]


def borders() -> Tensor:
    """Between neighbouring magnitudes; what equals a border has the lower code, so those of odd codes end below it."""
    magnitudes = torch.tensor(MAGNITUDES)
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    odd = torch.arange(len(middles)) % 2 == 1
    return torch.where(odd, torch.nextafter(middles, torch.tensor(0.0)), middles)


@functools.lru_cache(maxsize=8)
def borders_on(device: torch.device) -> Tensor:
    """The same on a device."""
    return table(borders(), device)
