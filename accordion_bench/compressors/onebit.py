"""1-bit SGD: signs that decode to the mean of what they stand for."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.compressors.base import Context
from accordion_bench.compressors.oneshot import OneShot
from accordion_bench.compressors.packed_codes import look_up_on_device
from accordion_bench.compressors.rounding.passes import refuse_non_finite
from accordion_bench.compressors.rounding.signs import encode_signs
from accordion_bench.compressors.rounding.sums import add_signs_
from accordion_bench.compressors.tiles import bucket_tiles
from accordion_bench.plan import TensorSpec


class OneBit(OneShot):
    """C(v)_i = c+ if v_i >= 0 else c-, per column: c+ the mean of its non-negative entries, c- of its negative ones.

    A column holds the weights of one output unit, which is a row of the matrix view (first dimension by all others); a
    tensor of one dimension is one column. An empty part has c = 0. No scale of the signs alone does better in squared
    error, so it is a contraction, meant for error feedback.

    Under `collective=two_way` a piece of a tensor is one column. The message is (c+ + c-)/2 and (c+ - c-)/2 as float32
    per column, then the bits (1 = negative). Source: Seide et al. 2014.
    """

    traits = replace(OneShot.traits, collective_reason="signs do not add up in one bit")

    @staticmethod
    def column(spec: TensorSpec) -> int:
        """Coordinates that share one pair of centroids."""
        return spec.matrix[1] if spec.ndim > 1 else spec.numel

    def contraction(self, spec: TensorSpec, level: float) -> float:
        return 1 / self.column(spec)

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return 8 * (spec.numel // self.column(spec)) + -(-spec.numel // 8)

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        size = self.column(spec)
        total_R, below_R, count_R = self._sums(x_R, size)
        high_R = (total_R - below_R).clamp_min(0) / (size - count_R).clamp_min(1)
        low_R = below_R / count_R.clamp_min(1)
        # the two values are middle + half and middle - half
        middle_R, half_R = (high_R + low_R) / 2, (high_R - low_R) / 2
        refuse_non_finite(torch.cat([middle_R, half_R], dim=1))
        return torch.cat([middle_R.view(torch.uint8), half_R.view(torch.uint8), encode_signs(x_R)], dim=1)

    @staticmethod
    def _sums(x_R: Tensor, size: int) -> tuple[Tensor, ...]:
        """Per column [R, n]: of the entries, of the negative ones, and how many of these there are."""
        n = x_R.shape[1] // size
        if x_R.device.type != "cpu":
            columns_R = x_R.float().unflatten(1, (n, size))
            negative_R = columns_R.clamp_max(0)
            return columns_R.sum(2), negative_R.sum(2), (negative_R < 0).sum(2)
        sums_R = torch.zeros(len(x_R), 3, n)
        for sums, x in zip(sums_R, x_R, strict=True):
            for part, shape, columns in bucket_tiles(n * size, size, x.device):
                entries = x[part].view(shape)
                negative = torch.lt(entries, 0, out=torch.empty_like(entries))
                sums[2, columns] += negative.sum(-1)
                sums[1, columns] += negative.mul_(entries).sum(-1)
                sums[0, columns] += entries.sum(-1)
        return sums_R.unbind(1)

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        size = self.column(spec)
        header = 8 * (spec.numel // size)
        if total_R.device.type != "cpu":
            messages = message_AR.flatten(0, 1)
            copy = messages[:, :header].clone(memory_format=torch.contiguous_format)
            middle, half = (copy.view(torch.float32) * alpha).chunk(2, dim=1)
            signs = look_up_on_device(messages[:, header:], (1.0, -1.0), spec.numel).unflatten(1, (-1, size))
            values = signs.mul_(half[..., None]).add_(middle[..., None])
            total_R.add_(values.view(*message_AR.shape[:2], -1).sum(0))
            return
        for total, message_A in zip(total_R, message_AR.unbind(1), strict=True):
            for message in message_A:
                middle, half = (message[:header].clone().view(torch.float32) * alpha).chunk(2)
                for part, shape, columns in bucket_tiles(spec.numel, size, total.device):
                    total[part].view(shape).add_(middle[columns, None])
                add_signs_(total, message[None, header:], half[None], size)
