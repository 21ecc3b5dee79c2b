"""Natural compression: random rounding to a power of two."""

import functools
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Context
from accordion_bench.codecs.coding import MANTISSA, Coding
from accordion_bench.compressors.dense import NONE_FITTED, Codebooks, DenseCodes
from accordion_bench.compressors.description import FEEDBACK, TRAVEL
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import TensorSpec


def _variance(compressor: "Natural", x_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
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
        claims=replace(DenseCodes.description.claims, variance=_variance),
    )

    stream = "Natural"
    traits = replace(DenseCodes.traits, whole_model=True, unbiased=True, contracts=True, replays=True)

    def coding(self, level: float, fitted: Codebooks = NONE_FITTED) -> Coding:
        return coding_of(self.exponent_bits)


@functools.cache
def coding_of(exponent_bits: int) -> Coding:
    """Return the coding into powers of two with the given number of exponent bits, and signs; code 0 represents 0."""
    exponents = torch.arange(1 << exponent_bits, dtype=torch.int32)
    if exponent_bits == 7:
        exponents = torch.where(exponents > 0, exponents + 63, 0)
    powers = tuple((exponents << MANTISSA).view(torch.float32).tolist())
    return Coding("power", powers, bits=MANTISSA, signs=True, stream=Natural.stream)
