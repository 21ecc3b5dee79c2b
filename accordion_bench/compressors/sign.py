"""Signs: one bit per coordinate, plain or with one scale per block."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.compressors.base import Context
from accordion_bench.compressors.dense_codes import Batch, Dense, DenseCodes, scaled_, values_of
from accordion_bench.compressors.index_codes import pack_bits_on_device
from accordion_bench.compressors.oneshot import OneShot
from accordion_bench.compressors.rounding.signs import encode_scaled_signs, encode_signs
from accordion_bench.compressors.rounding.sums import add_signs_
from accordion_bench.options import checks
from accordion_bench.plan import TensorSpec


class Sign(DenseCodes):
    """C(v) = s_b sgn(v) on each block b of d_b coordinates, sgn(v) = +1 if v >= 0 else -1; s_b = 1 or ||v_b||_1 / d_b.

    With the scale, ||v - C(v)||^2 = ||v||^2 - sum_b ||v_b||_1^2 / d_b: a contraction, fit for error feedback. Without,
    the update is the mean of signs; with `collective=two_way` the sign of their sum, a majority vote.

    Args:
        scale: `none` (signSGD), `l1` (scaled sign).
        block: what shares one scale: `tensor`, a whole tensor; `chunk`, `block_size` consecutive coordinates of a
            tensor; `bucket`, consecutive tensors, flattened, of together at most `block_size` coordinates (a larger
            tensor by itself).
        block_size: coordinates; null with `block=tensor`.
        min_numel: smaller tensors (or buckets) travel dense.

    The message is a float32 scale per block, then the bits (1 = negative), least significant first. Source: Bernstein
    et al. 2018 (arXiv 1802.04434); Karimireddy et al. 2019 (1901.09847); Zheng, Huang, Kwok 2019 (1905.10936).
    """

    traits = replace(OneShot.traits, whole_model=True, collective_reason="signs do not add up in one bit")

    def __init__(
        self, scale: str = "none", block: str = "tensor", block_size: int | None = None, min_numel: int = 0
    ) -> None:
        scaled = checks.choice("scale", scale, ["none", "l1"]) == "l1"
        self.block = checks.choice("block", block, ["tensor", "chunk", "bucket"])
        if block == "tensor" and block_size is not None:
            raise checks.ValueRefused("block_size", "null where block is tensor", block_size, None)
        if block != "tensor":
            checks.integer("block_size", block_size, at_least=1, instead=1_048_576)
        self.chunk = block_size if block == "chunk" else None
        self.min_numel = checks.integer("min_numel", min_numel, at_least=0)
        self.traits = replace(self.traits, scaled=scaled, reduces="mean" if scaled else "other")

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return level is not None and spec.numel >= self.min_numel

    def contraction(self, spec: TensorSpec, level: float) -> float | None:
        return 1 / min(spec.numel, self.chunk or spec.numel) if self.traits.scaled and spec.numel else None

    def blocks(self, spec: TensorSpec) -> int:
        """Scales in a message."""
        if not self.traits.scaled:
            return 0
        return -(-spec.numel // self.chunk) if self.chunk else 1

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return 4 * self.blocks(spec) + -(-spec.numel // 8)

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        if not self.traits.scaled:
            return encode_signs(x_R)
        bits_R, scales_R = encode_scaled_signs(x_R, self.chunk)
        return torch.cat([scales_R.view(torch.uint8), bits_R], dim=1)

    def dense(self, level: float, ctx: Context) -> Dense | None:
        return Dense((2,), self.chunk, header=self.traits.scaled, draws=False)

    def encode_chunks(self, x_W: Tensor, blocks_W: Tensor, batch: Batch) -> tuple[Tensor | None, list[Tensor]]:
        codes_W = pack_bits_on_device((x_W < 0).flatten(0, 1)).unflatten(0, x_W.shape[:2])
        if not self.traits.scaled:
            return None, [codes_W]
        return (batch.chunks.norms(x_W, 1) / batch.chunks.entries).float(), [codes_W]

    def decode_chunks(self, header_A: Tensor, codes_A: Sequence[Tensor], batch: Batch) -> Tensor:
        signs_A = values_of(codes_A[0], (1.0, -1.0), batch.chunks)
        return scaled_(signs_A, header_A, batch.chunks) if self.traits.scaled else signs_A

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        header, messages = 4 * self.blocks(spec), message_AR.flatten(0, 1)
        if header:
            scales = messages[:, :header].clone(memory_format=torch.contiguous_format).view(torch.float32)
        else:
            scales = torch.ones(len(messages), 1, device=total_R.device)
        add_signs_(total_R, messages[:, header:], scales * alpha, self.chunk)
