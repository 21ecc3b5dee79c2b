"""Natural compression: random rounding to a power of two."""

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench import check
from accordion_bench.compressors import codes, wire
from accordion_bench.compressors.base import Context
from accordion_bench.compressors.oneshot import NonFiniteRow, OneShot
from accordion_bench.plan import TensorSpec
from accordion_bench.random_bits import random_bits

MANTISSA = 23


class Natural(OneShot):
    """C(v)_i = sgn(v_i) 2^e or 2^(e+1), 2^e <= |v_i| < 2^(e+1), up with probability |v_i| / 2^e - 1.

    Unbiased; E||C(v) - v||^2 <= ||v||^2 / 8, attained at |v_i| / 2^e = 4/3. The rounding is one addition of 23 random
    bits to the float's mantissa: what carries, goes up.

    Args:
        exponent_bits: 8, every float32; 7, powers from 2^-63 to 2^63: smaller entries are rounded at random to 0 or
            2^-63 (still unbiased), larger ones are cut. Lower = more compression.

    The message is the exponents, one after the other, then the sign bits: 9 (or 8) bits per coordinate. Source: Horvath
    et al. 2019 (arXiv 1905.10988).
    """

    whole_model = True
    unbiased = True
    because = "a sum of powers of two is none"

    def __init__(self, exponent_bits: int = 8) -> None:
        self.exponent_bits = check.integer("exponent_bits", exponent_bits, at_least=7)
        if exponent_bits > 8:
            raise check.ValueRefused("exponent_bits", "7 or 8", exponent_bits, 8)

    def variance(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
        """E||C(v) - v||^2 of each row: sum_i (2^(e+1) - |v_i|)(|v_i| - 2^e)."""
        size = x_R.abs().double()
        low = torch.where(size > 0, 2.0 ** torch.floor(torch.log2(size.clamp_min(1e-300))), 0)
        return ((2 * low - size) * (size - low)).sum(1)

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return codes.code_bytes(spec.numel, 1 << self.exponent_bits) + codes.code_bytes(spec.numel, 2)

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        x_R = x_R.float()
        if not x_R.sum(1).isfinite().all() and not x_R.isfinite().all():
            raise NonFiniteRow(int((~x_R.isfinite()).any(1).nonzero()[0]))
        noise_R = torch.stack([random_bits(key, 0, spec.numel, x_R.device) for key in keys])
        noise_R = (noise_R >> (32 - MANTISSA)) & ((1 << MANTISSA) - 1)
        rounded_R = x_R.contiguous().view(torch.int32) & 0x7FFFFFFF
        if self.exponent_bits == 8:
            exponents_R = ((rounded_R + noise_R) >> MANTISSA).clamp_max_(254)
        else:
            above = (((rounded_R + noise_R) >> MANTISSA) - 63).clamp_max_(127)
            below = noise_R < x_R.abs() * 2.0 ** (63 + MANTISSA)  # smaller than 2^-63: that or nothing
            exponents_R = torch.where(x_R.abs() < 2.0**-63, below.int(), above)
        packed = codes.pack_codes(exponents_R.to(torch.uint8), 1 << self.exponent_bits)
        return torch.cat([packed, wire.pack_bits(x_R < 0)], dim=1)

    def decode(self, message_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
        header = codes.code_bytes(spec.numel, 1 << self.exponent_bits)
        exponents_R = codes.unpack_codes(message_R[:, :header].contiguous(), 1 << self.exponent_bits, spec.numel).int()
        if self.exponent_bits == 7:
            exponents_R = torch.where(exponents_R > 0, exponents_R + 63, 0)
        negative_R = wire.unpack_bits(message_R[:, header:].contiguous(), spec.numel)
        size_R = (exponents_R << MANTISSA).view(torch.float32)
        return torch.where(negative_R, -size_R, size_R)
