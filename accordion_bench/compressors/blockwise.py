"""Eight bits per coordinate with a scale per bucket: fp8 and int8."""

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench import check
from accordion_bench.compressors import levels
from accordion_bench.compressors.base import Context
from accordion_bench.compressors.oneshot import NonFiniteRow, OneShot
from accordion_bench.compressors.tiles import tiles
from accordion_bench.plan import TensorSpec
from accordion_bench.random_bits import uniforms

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}


class Blockwise(OneShot):
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

    whole_model = True
    because = "8-bit numbers with different scales do not add up"

    def __init__(self, format: str = "e4m3", bucket_size: int | None = 1024, rounding: str = "nearest") -> None:
        self.format = check.choice("format", format, list(TYPES))
        self.bucket_size = None if bucket_size is None else check.integer("bucket_size", bucket_size, at_least=1)
        self.rounding = check.choice("rounding", rounding, ["nearest", "random"])
        if rounding == "random" and format != "int8":
            raise check.ValueRefused("rounding", "nearest where format is not int8", rounding, "nearest")
        self.unbiased = rounding == "random"
        self.draws = "worker" if self.unbiased else ""

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
        if not self.unbiased:
            return None
        scales_R = self.scales(x_R, spec).double().repeat_interleave(self.size(spec), dim=1)[:, : spec.numel]
        steps = torch.where(scales_R > 0, x_R.double() / scales_R, 0)
        return (scales_R.square() * (steps.ceil() - steps) * (steps - steps.floor())).sum(1)

    def scales(self, x_R: Tensor, spec: TensorSpec) -> Tensor:
        """s_b of every bucket, float32 [R, m]; a bucket whose s_b would be no normal float32 counts as zero."""
        scales_R = levels.bucket_norms(x_R, self.size(spec), "linf") / LARGEST[self.format]
        if not scales_R.isfinite().all():
            raise NonFiniteRow(int((~scales_R.isfinite()).any(1).nonzero()[0]))
        return torch.where(scales_R >= torch.finfo(torch.float32).tiny, scales_R, 0)

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        scales_R, size, n = self.scales(x_R, spec), self.size(spec), spec.numel
        inverse_R = torch.where(scales_R > 0, 1 / scales_R, 0)
        bytes_R = torch.empty(len(x_R), n, dtype=torch.uint8, device=x_R.device)
        limit = LARGEST[self.format]
        for row, x in enumerate(x_R):
            for part, whole, buckets in self._parts(n, size, x.device):
                scaled = (x[part].view(whole).float() * inverse_R[row, buckets, None]).view(-1)
                if self.rounding == "random":
                    scaled.add_(uniforms(keys[row], part.start, len(scaled), x.device)).floor_()
                elif self.format == "int8":
                    scaled.round_()
                codes = scaled.clamp_(-limit, limit).to(TYPES[self.format])
                bytes_R[row, part] = codes.view(torch.uint8)
        return torch.cat([scales_R.view(torch.uint8), bytes_R], dim=1)

    def decode(self, message_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
        rows_R = torch.zeros(len(message_R), spec.numel, device=message_R.device)
        self.add_decoded_(rows_R, message_R[None], spec, level, ctx)
        return rows_R

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        header, size = 4 * self.buckets(spec), self.size(spec)
        for total, message_A in zip(total_R, message_AR.unbind(1), strict=True):
            scales_A = message_A[:, :header].clone(memory_format=torch.contiguous_format).view(torch.float32) * alpha
            for part, whole, buckets in self._parts(spec.numel, size, total.device):
                for message, scales in zip(message_A, scales_A, strict=True):
                    values = self._values(message[header + part.start : header + part.stop]).view(whole)
                    total[part].view(whole).add_(values.mul_(scales[buckets, None]))

    @staticmethod
    def _parts(n: int, size: int, device: torch.device):  # type: ignore[no-untyped-def]
        """(coordinates, their shape as buckets, bucket numbers), tile by tile; the shorter last bucket by itself."""
        whole = n // size * size
        for part in tiles(whole, device, size) if size <= 1 << 16 else _within_buckets(whole, size, device):
            yield part, (-1, min(size, part.stop - part.start)), slice(part.start // size, -(-part.stop // size))
        if whole < n:
            yield slice(whole, n), (1, n - whole), slice(whole // size, whole // size + 1)

    def _values(self, codes: Tensor) -> Tensor:
        """The numbers as float32; on a CPU torch converts fp8 one by one, so by way of float16's bits."""
        if self.format == "int8" or codes.device.type != "cpu":
            return codes.contiguous().view(TYPES[self.format]).float()
        wide = codes.contiguous().view(torch.int8).short()  # the sign fills the upper byte
        if self.format == "e5m2":
            return wide.bitwise_left_shift_(8).view(torch.float16).float()
        # exponent and mantissa into float16's places, whose exponent then counts 8 too little
        sign = wide.bitwise_and(-0x8000)
        return wide.bitwise_and_(0x7F).bitwise_left_shift_(7).bitwise_or_(sign).view(torch.float16).float().mul_(256.0)


def _within_buckets(whole: int, size: int, device: torch.device):  # type: ignore[no-untyped-def]
    """Tiles that do not cross the borders of buckets larger than a tile."""
    for start in range(0, whole, size):
        for part in tiles(size, device):
            yield slice(start + part.start, start + part.stop)
