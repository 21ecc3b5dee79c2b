"""Natural compression: random rounding to a power of two."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.compressors import index_codes, packed_codes
from accordion_bench.compressors.base import Context
from accordion_bench.compressors.dense_codes import Batch, Dense, DenseCodes
from accordion_bench.compressors.oneshot import OneShot
from accordion_bench.compressors.rounding.passes import refuse_non_finite
from accordion_bench.compressors.tiles import tiles
from accordion_bench.options import checks
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.counter_rng import Stream, integers_of

MANTISSA = 23


class Natural(DenseCodes):
    """C(v)_i = sgn(v_i) 2^e or 2^(e+1), 2^e <= |v_i| < 2^(e+1), up with probability |v_i| / 2^e - 1.

    Unbiased; E||C(v) - v||^2 <= ||v||^2 / 8, attained at |v_i| / 2^e = 4/3. The rounding is one addition of 23 random
    bits to the float's mantissa: what carries, goes up.

    Args:
        exponent_bits: 8, every float32; 7, powers from 2^-63 to 2^63: smaller entries are rounded at random to 0 or
            2^-63 (still unbiased), larger ones are cut. Lower = more compression.

    The message is the exponents, one after the other, then the sign bits: 9 (or 8) bits per coordinate. Source: Horvath
    et al. 2019 (arXiv 1905.10988).
    """

    traits = replace(
        OneShot.traits, whole_model=True, unbiased=True, collective_reason="a sum of powers of two is none"
    )

    def __init__(self, exponent_bits: int = 8) -> None:
        self.exponent_bits = checks.integer("exponent_bits", exponent_bits, at_least=7)
        if exponent_bits > 8:
            raise checks.ValueRefused("exponent_bits", "7 or 8", exponent_bits, 8)

    def variance(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
        """E||C(v) - v||^2 of each row: sum_i (2^(e+1) - |v_i|)(|v_i| - 2^e)."""
        size = x_R.abs().double()
        low = torch.where(size > 0, 2.0 ** torch.floor(torch.log2(size.clamp_min(1e-300))), 0)
        return ((2 * low - size) * (size - low)).sum(1)

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return packed_codes.code_bytes(spec.numel, 1 << self.exponent_bits) + packed_codes.code_bytes(spec.numel, 2)

    def dense(self, level: float, ctx: Context) -> Dense | None:
        return Dense((1 << self.exponent_bits, 2), header=False)

    def encode_chunks(self, x_W: Tensor, blocks_W: Tensor, batch: Batch) -> tuple[Tensor | None, list[Tensor]]:
        code = self._rounded(x_W, integers_of(blocks_W, MANTISSA)).to(torch.uint8).flatten(0, 1)
        exponents = packed_codes.pack_on_device(code, 1 << self.exponent_bits)
        streams = exponents, index_codes.pack_bits_on_device((x_W < 0).flatten(0, 1))
        return None, [stream.unflatten(0, x_W.shape[:2]) for stream in streams]

    def decode_chunks(self, header_A: Tensor, codes_A: Sequence[Tensor], batch: Batch) -> Tensor:
        A, (exponents, signs) = codes_A[0].shape[:2], (codes.flatten(0, 1) for codes in codes_A)
        bits = packed_codes.unpack_on_device(exponents, 1 << self.exponent_bits, batch.chunks.length).int()
        negative = packed_codes.look_up_on_device(signs, (1.0, -1.0), batch.chunks.length)
        return self._powers(bits).mul_(negative).unflatten(0, A)

    def _powers(self, bits: Tensor) -> Tensor:
        """What codes of exponents, int32, stand for; overwrites them."""
        if self.exponent_bits == 7:
            bits = torch.where(bits > 0, bits + 63, 0)
        return bits.bitwise_left_shift_(MANTISSA).view(torch.float32)

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        if x_R.device.type == "cpu" and not x_R.sum(1).isfinite().all():
            refuse_non_finite(x_R)
        K, n = 1 << self.exponent_bits, spec.numel
        message_R = torch.empty(len(x_R), self.message_bytes(spec, level), dtype=torch.uint8, device=x_R.device)
        exponents_R, signs_R = message_R.split([packed_codes.code_bytes(n, K), packed_codes.code_bytes(n, 2)], dim=1)
        for row, key in enumerate(keys):
            stream = Stream(key, n, x_R.device)
            for part in tiles(n, x_R.device):
                x = x_R[row, part].float()
                code = self._rounded(x, stream.integers(part.start, len(x), MANTISSA)).to(torch.uint8)
                packed = packed_codes.pack_codes(code[None], K)[0]
                exponents_R[row, packed_codes.code_bytes(part.start, K) :][: len(packed)] = packed
                signs = index_codes.pack_bits((x < 0)[None])[0]
                signs_R[row, part.start // 8 :][: len(signs)] = signs
        return message_R

    def _rounded(self, x: Tensor, noise: Tensor) -> Tensor:
        """The code of each coordinate's exponent, int32."""
        bits = x.contiguous().view(torch.int32).bitwise_and(0x7FFFFFFF)
        exponents = (bits + noise).bitwise_right_shift_(MANTISSA)
        if self.exponent_bits == 8:
            return exponents.clamp_max_(254)
        below = noise < x.abs() * 2.0 ** (63 + MANTISSA)  # smaller than 2^-63: that or nothing
        return torch.where(x.abs() < 2.0**-63, below.int(), exponents.sub_(63).clamp_max_(127))

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        K, n = 1 << self.exponent_bits, spec.numel
        header = packed_codes.code_bytes(n, K)
        for total, message_A in zip(total_R, message_AR.unbind(1), strict=True):
            for part in tiles(n, total.device):
                count = part.stop - part.start
                packed = packed_codes.code_place(part, K)
                signs = slice(header + part.start // 8, header + -(-part.stop // 8))
                for message in message_A:
                    bits = packed_codes.unpack_codes(message[None, packed].contiguous(), K, count)[0].int()
                    if self.exponent_bits == 7:
                        bits = torch.where(bits > 0, bits + 63, 0)
                    negative = packed_codes.unpack_codes(message[None, signs].contiguous(), 2, count)[0].int()
                    bits = bits.bitwise_left_shift_(MANTISSA).bitwise_or_(negative.bitwise_left_shift_(31))
                    total[part].add_(bits.view(torch.float32), alpha=alpha)
