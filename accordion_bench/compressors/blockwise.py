"""Eight bits per coordinate with a scale per bucket: fp8 and int8."""

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench import check
from accordion_bench.compressors import levels
from accordion_bench.compressors.base import Context
from accordion_bench.compressors.oneshot import NonFiniteRow, OneShot
from accordion_bench.plan import TensorSpec

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


class Fp8(OneShot):
    """C(v) = s_b fp8(v / s_b) on each bucket b, s_b = max |v_b| / largest fp8 number; rounds to nearest.

    An entry is off by at most 2^-4 (e4m3) or 2^-3 (e5m2) of itself, unless it is far below the bucket's largest.

    Args:
        format: `e4m3`, largest number 448; `e5m2`, 57,344.
        bucket_size: consecutive coordinates that share one scale; smaller = more bytes. null = a whole tensor.

    The message is a float32 scale per bucket, then the bytes. Source: Micikevicius et al. 2022 (arXiv 2209.05433).
    """

    whole_model = True
    because = "8-bit floats with different scales do not add up"

    def __init__(self, format: str = "e4m3", bucket_size: int | None = 1024) -> None:
        self.format = check.choice("format", format, list(LARGEST))
        self.bucket_size = None if bucket_size is None else check.integer("bucket_size", bucket_size, at_least=1)
        self.dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[format]

    def buckets(self, spec: TensorSpec) -> int:
        """Scales in a message."""
        return -(-spec.numel // self.bucket_size) if self.bucket_size else 1

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return 4 * self.buckets(spec) + spec.numel

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        x_R = x_R.float()
        scales_R = levels.bucket_norms(x_R, self.bucket_size, "linf") / LARGEST[self.format]
        if not scales_R.isfinite().all():
            raise NonFiniteRow(int((~scales_R.isfinite()).any(1).nonzero()[0]))
        # a bucket whose largest entry is below the smallest float times 448 counts as zero
        inverse_R = torch.where(scales_R >= torch.finfo(torch.float32).tiny, 1 / scales_R, 0)
        scaled_R = multiply_buckets(x_R, inverse_R, self.bucket_size)
        limit = LARGEST[self.format]
        bytes_R = scaled_R.clamp_(-limit, limit).to(self.dtype).view(torch.uint8)
        return torch.cat([scales_R.view(torch.uint8), bytes_R], dim=1)

    def decode(self, message_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
        header = 4 * self.buckets(spec)
        scales_R = message_R[:, :header].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return multiply_buckets(self._values(message_R[:, header:]), scales_R, self.bucket_size)

    def _values(self, bytes_R: Tensor) -> Tensor:
        """The fp8 numbers as float32; on a CPU torch converts e4m3 one by one, so by way of float16's bits."""
        if bytes_R.device.type != "cpu":
            return bytes_R.contiguous().view(self.dtype).float()
        wide_R = bytes_R.contiguous().view(torch.int8).short()  # the sign fills the upper byte
        if self.format == "e5m2":
            return (wide_R << 8).view(torch.float16).float()
        # exponent and mantissa into float16's places, whose exponent then counts 8 too little
        return (((wide_R & 0x7F) << 7) | (wide_R & -0x8000)).view(torch.float16).float().mul_(256.0)


def multiply_buckets(x_R: Tensor, factors_R: Tensor, bucket_size: int | None) -> Tensor:
    """x [R, N] times one factor [R, m] per bucket, as a new tensor; the last bucket may be shorter."""
    if bucket_size is None or factors_R.shape[1] == 1:
        return x_R * factors_R
    whole = x_R.shape[1] // bucket_size * bucket_size
    out_R = torch.empty_like(x_R, memory_format=torch.contiguous_format)
    body = (x_R[:, :whole].unflatten(1, (-1, bucket_size)), factors_R[:, : whole // bucket_size, None])
    torch.mul(*body, out=out_R[:, :whole].unflatten(1, (-1, bucket_size)))
    if whole < x_R.shape[1]:
        torch.mul(x_R[:, whole:], factors_R[:, -1:], out=out_R[:, whole:])
    return out_R
