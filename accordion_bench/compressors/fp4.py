"""fp4: four-bit floats, a sign and an exponent, with a scale per bucket."""

from dataclasses import replace

from accordion_bench.codecs.coding import E3M0_MAGNITUDES, Coding
from accordion_bench.compressors.dense import NONE_FITTED, Codebooks, DenseCodes
from accordion_bench.compressors.description import FEEDBACK, TRAVEL
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import TensorSpec

CODING = Coding("e3m0", (*E3M0_MAGNITUDES, *(-magnitude for magnitude in E3M0_MAGNITUDES)), "linf", "largest")


def _contraction(compressor: "FP4", spec: TensorSpec, level: float) -> float:
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
        claims=replace(DenseCodes.description.claims, contraction=_contraction),
    )

    stream = "FP4"
    traits = replace(DenseCodes.traits, whole_model=True, replays=True)

    def block_of(self, spec: TensorSpec) -> int | None:
        return self.bucket_size

    def coding(self, level: float, fitted: Codebooks = NONE_FITTED) -> Coding:
        return CODING
