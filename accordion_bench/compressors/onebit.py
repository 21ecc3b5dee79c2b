"""1-bit SGD: signs that decode to the mean of what they stand for."""

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.compressors import wire
from accordion_bench.compressors.base import Context
from accordion_bench.compressors.oneshot import NonFiniteRow, OneShot
from accordion_bench.plan import TensorSpec


class OneBit(OneShot):
    """C(v)_i = c+ if v_i >= 0 else c-, per column: c+ the mean of its non-negative entries, c- of its negative ones.

    A column holds the weights of one output unit, which is a row of the matrix view (first dimension by all others); a
    tensor of one dimension is one column. An empty part has c = 0. No scale of the signs alone does better in squared
    error, so it is a contraction, meant for error feedback.

    The message is (c+, c-) as float32 per column, then the bits (1 = negative). Source: Seide et al. 2014.
    """

    because = "signs do not add up in one bit"

    @staticmethod
    def column(spec: TensorSpec) -> int:
        """Coordinates that share one pair of centroids."""
        return spec.matrix[1] if spec.ndim > 1 else spec.numel

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return 8 * (spec.numel // self.column(spec)) + -(-spec.numel // 8)

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        columns_R = x_R.unflatten(1, (-1, self.column(spec)))
        negative_R = columns_R < 0
        counts = negative_R.sum(-1)
        sums, below = columns_R.sum(-1), columns_R.clamp_max(0).sum(-1)
        low = below / counts.clamp_min(1)
        high = (sums - below).clamp_min(0) / (columns_R.shape[-1] - counts).clamp_min(1)
        centroids_R = torch.stack([high, low], dim=-1).flatten(1).float()
        if not centroids_R.isfinite().all():
            raise NonFiniteRow(int((~centroids_R.isfinite()).any(1).nonzero()[0]))
        return torch.cat([centroids_R.view(torch.uint8), wire.pack_bits(negative_R.flatten(1))], dim=1)

    def decode(self, message_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
        rows_R = torch.zeros(len(message_R), spec.numel, device=message_R.device)
        self.add_decoded_(rows_R, message_R[None], spec, level, ctx)
        return rows_R

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        size = self.column(spec)
        header = 8 * (spec.numel // size)
        for total, message_A in zip(total_R, message_AR.unbind(1), strict=True):
            for message in message_A:
                centroids = message[:header].clone().view(torch.float32).unflatten(0, (-1, 2)) * alpha
                bits = wire.unpack_bits(message[None, header:].contiguous(), spec.numel)[0].unflatten(0, (-1, size))
                total.view(-1, size).add_(torch.where(bits, centroids[:, 1:], centroids[:, :1]))
