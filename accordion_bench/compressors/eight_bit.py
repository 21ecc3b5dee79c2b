"""Eight bits per coordinate with a scale per bucket: fp8 and int8."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.compressors.base import Context
from accordion_bench.compressors.dense_codes import Batch, Dense, DenseCodes, scaled_
from accordion_bench.compressors.oneshot import OneShot
from accordion_bench.compressors.rounding.norms import bucket_norms
from accordion_bench.compressors.rounding.passes import refuse_non_finite
from accordion_bench.compressors.tiles import bucket_tiles
from accordion_bench.options import checks
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.counter_rng import Stream, uniforms_of

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
UNIT = {"e4m3": 256.0}  # float16's exponent counts 8 less than e4m3's
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
        OneShot.traits, whole_model=True, collective_reason="8-bit numbers with different scales do not add up"
    )

    def __init__(self, format: str = "e4m3", bucket_size: int | None = 1024, rounding: str = "nearest") -> None:
        self.format = checks.choice("format", format, list(TYPES))
        self.bucket_size = None if bucket_size is None else checks.integer("bucket_size", bucket_size, at_least=1)
        self.rounding = checks.choice("rounding", rounding, ["nearest", "random"])
        if rounding == "random" and format != "int8":
            raise checks.ValueRefused("rounding", "nearest where format is not int8", rounding, "nearest")
        self.traits = replace(self.traits, unbiased=rounding == "random")

    def size(self, spec: TensorSpec) -> int:
        """Coordinates in a bucket."""
        return max(1, min(spec.numel, self.bucket_size or spec.numel))

    def buckets(self, spec: TensorSpec) -> int:
        """Scales in a message."""
        return -(-spec.numel // self.size(spec))

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return 4 * self.buckets(spec) + spec.numel

    def variance(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor | None:
        """E||C(v) - v||^2 of each row, the closed form, where rounding is random."""
        if not self.traits.unbiased:
            return None
        scales_R = self.scales(x_R, spec).double().repeat_interleave(self.size(spec), dim=1)[:, : spec.numel]
        steps = torch.where(scales_R > 0, x_R.double() / scales_R, 0)
        return (scales_R.square() * (steps.ceil() - steps) * (steps - steps.floor())).sum(1)

    def scales(self, x_R: Tensor, spec: TensorSpec) -> Tensor:
        """s_b of every bucket, float32 [R, m]; a bucket whose s_b would be no normal float32 counts as zero."""
        scales_R = bucket_norms(x_R, self.size(spec), "linf") / LARGEST[self.format]
        refuse_non_finite(scales_R)
        return torch.where(scales_R < torch.finfo(torch.float32).tiny, 0, scales_R)

    def dense(self, level: float, ctx: Context) -> Dense | None:
        return Dense((256,), self.bucket_size, draws=self.rounding == "random")

    def encode_chunks(self, x_W: Tensor, blocks_W: Tensor, batch: Batch) -> tuple[Tensor | None, list[Tensor]]:
        scales_W = batch.chunks.norms(x_W, math.inf).float() / LARGEST[self.format]
        scales_W = torch.where(scales_W < torch.finfo(torch.float32).tiny, 0, scales_W)
        steps_W = scaled_(x_W, torch.where(scales_W > 0, 1 / scales_W, 0), batch.chunks)
        if self.rounding == "random":
            steps_W.add_(uniforms_of(blocks_W)).floor_().clamp_(-127, 127)
        elif self.format == "int8":
            steps_W.round_()
        return scales_W, [steps_W.to(TYPES[self.format]).view(torch.uint8)]

    def decode_chunks(self, header_A: Tensor, codes_A: Sequence[Tensor], batch: Batch) -> Tensor:
        return scaled_(codes_A[0].view(TYPES[self.format]).float(), header_A, batch.chunks)

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        scales_R, size, n = self.scales(x_R, spec), self.size(spec), spec.numel
        inverse_R = torch.where(scales_R > 0, 1 / scales_R, 0)
        message_R = torch.empty(len(x_R), self.message_bytes(spec, level), dtype=torch.uint8, device=x_R.device)
        header = 4 * self.buckets(spec)
        message_R[:, :header] = scales_R.view(torch.uint8)
        for row, x in enumerate(x_R):
            numbers = message_R[row, header:].view(TYPES[self.format])
            stream = Stream(keys[row], n, x.device) if self.rounding == "random" else None
            for part, whole, buckets in bucket_tiles(n, size, x.device):
                scaled = (x[part].view(whole).float() * inverse_R[row, buckets, None]).view(-1)
                if stream:
                    scaled.add_(stream.uniforms(part.start, len(scaled))).floor_().clamp_(-127, 127)
                elif self.format == "int8":
                    scaled.round_()
                numbers[part].copy_(scaled)
        return message_R

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        header, size = 4 * self.buckets(spec), self.size(spec)
        for total, message_A in zip(total_R, message_AR.unbind(1), strict=True):
            scales_A = message_A[:, :header].clone(memory_format=torch.contiguous_format).view(torch.float32)
            scales_A = scales_A * (alpha * UNIT.get(self.format, 1.0) if total.device.type == "cpu" else alpha)
            for part, whole, buckets in bucket_tiles(spec.numel, size, total.device):
                for message, scales in zip(message_A, scales_A, strict=True):
                    values = self._values(message[header + part.start : header + part.stop]).view(whole)
                    total[part].view(whole).add_(values.mul_(scales[buckets, None]))

    def _values(self, codes: Tensor) -> Tensor:
        """The numbers as float32; on a CPU in `UNIT`s, by way of float16's bits: torch converts fp8 one by one."""
        if self.format == "int8" or codes.device.type != "cpu":
            return codes.contiguous().view(TYPES[self.format]).float()
        wide = codes.contiguous().view(torch.int8).short()  # the sign fills the upper byte
        if self.format == "e5m2":
            return wide.bitwise_left_shift_(8).view(torch.float16).float()
        # exponent and mantissa into float16's places
        return wide.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16).float()
