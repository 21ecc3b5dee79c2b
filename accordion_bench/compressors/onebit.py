"""1-bit SGD: signs that decode to the mean of what they stand for."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.compressors.base import Context
from accordion_bench.compressors.dense_codes import KEPT, contiguous, entries_on, refuse_buckets
from accordion_bench.compressors.non_finite_row import refuse_non_finite
from accordion_bench.compressors.oneshot import OneShot
from accordion_bench.compressors.packed_codes import look_up, pack_codes
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import kernels
from accordion_bench.tensors.counter_rng import BLOCK
from accordion_bench.tensors.kernels.rounding import SIGNS, Rounding
from accordion_bench.tensors.kernels.table import Table, addresses


class OneBit(OneShot):
    """C(v)_i = c+ if v_i >= 0 else c-, per column: c+ the mean of its non-negative entries, c- of its negative ones.

    A column holds the weights of one output unit, which is a row of the matrix view (first dimension by all others); a
    tensor of one dimension is one column. An empty part has c = 0. No scale of the signs alone does better in squared
    error, so it is a contraction, meant for error feedback.

    Under `collective=two_way` a piece of a tensor is one column. The message is (c+ + c-)/2 and (c+ - c-)/2 as float32
    per column, then the bits (1 = negative). Source: Seide et al. 2014.
    """

    spelled = {"onebit": "1-bit SGD"}
    traits = replace(
        OneShot.traits, kernels=("cpu", "cuda"), replays=True, collective_reason="signs do not add up in one bit"
    )

    @staticmethod
    def column(spec: TensorSpec) -> int:
        """Coordinates that share one pair of centroids."""
        return spec.matrix[1] if spec.ndim > 1 else spec.numel

    def contraction(self, spec: TensorSpec, level: float) -> float:
        return 1 / self.column(spec)

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return 8 * (spec.numel // self.column(spec)) + -(-spec.numel // 8)

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        columns_R = x_R.float().unflatten(1, (-1, self.column(spec)))
        below_R = columns_R.clamp_max(0)
        sums = [part.sum(2, dtype=torch.float64) for part in (columns_R, below_R, below_R < 0)]
        header_R = torch.cat(self.middle_and_half(sums, self.column(spec)), dim=1)
        refuse_non_finite(header_R)
        return torch.cat([header_R.view(torch.uint8), pack_codes((x_R < 0).to(torch.uint8), 2)], dim=1)

    @staticmethod
    def middle_and_half(sums: Sequence[Tensor], size: Any) -> tuple[Tensor, Tensor]:
        """The two values of columns as middle + half and middle - half, float32.

        Args:
            sums: of all entries, of the negative ones, and how many these are.
            size: entries of a column.
        """
        total, below, count = sums
        high, low = (total - below).clamp_min(0) / (size - count).clamp_min(1), below / count.clamp_min(1)
        return ((high + low) / 2).float(), ((high - low) / 2).float()

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        size, header = self.column(spec), 8 * (spec.numel // self.column(spec))
        messages = message_AR.flatten(0, 1)
        copy = messages[:, :header].clone(memory_format=torch.contiguous_format).view(torch.float32)
        middle, half = (copy * alpha).unflatten(1, (2, -1)).unsqueeze(-1).unbind(1)
        signs = look_up(messages[:, header:], (1.0, -1.0), spec.numel).unflatten(1, (-1, size))
        values_AR = signs.mul_(half).add_(middle).flatten(1).unflatten(0, message_AR.shape[:2])
        total_R.add_(values_AR.sum(0))

    def encode_into_(
        self,
        message_W: Tensor,
        starts: Sequence[int],
        rows_W: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        level: float,
        ctx: Context,
        workers: Sequence[int],
        purpose: str = "",
    ) -> None:
        room = kernels.room_of(rows_W)
        if room is None:
            super().encode_into_(message_W, starts, rows_W, specs, level, ctx, workers, purpose)
            return
        middles, halves = self._tables(specs, starts)
        rows_W = [contiguous(x_W) for x_W in rows_W]
        at, like, none = addresses(rows_W), rows_W[0], message_W.new_empty(0, 0, dtype=torch.float32)
        sums = [room.bucket_norms(at, middles, norm, like) for norm in ("sum", "below", "count")]
        headers_W = self.middle_and_half(sums, entries_on(middles, message_W.device))
        for header_W in headers_W:
            refuse_buckets(middles, header_W)
        room.write_headers(headers_W[1], halves, message_W)
        room.encode(at, middles, headers_W[0], none, np.empty((0, 0), np.uint64), message_W, like, Rounding(SIGNS, 2))

    def add_from_(
        self,
        targets_R: Sequence[Tensor],
        message_A: Tensor,
        starts: Sequence[int],
        specs: Sequence[TensorSpec],
        level: float,
        ctx: Context,
        alpha: float = 1.0,
        divisor: int = 1,
    ) -> None:
        room = kernels.room_of(targets_R)
        if room is None:
            super().add_from_(targets_R, message_A, starts, specs, level, ctx, alpha, divisor)
            return
        middles, halves = self._tables(specs, starts)
        middle_A, signs = room.read_headers(message_A, middles, alpha), [np.array([1, -1], np.float32)]
        targets, like = addresses(targets_R), targets_R[0]
        room.add_values(targets, halves, None, alpha, message_A, signs, like, divisor, middle_A)

    def _tables(self, specs: Sequence[TensorSpec], starts: Sequence[int]) -> tuple[Table, Table]:
        columns = tuple(self.column(spec) for spec in specs)
        return tables_of(tuple(spec.numel for spec in specs), columns, tuple(starts))


@functools.lru_cache(maxsize=KEPT)
def tables_of(lengths: tuple[int, ...], columns: tuple[int, ...], starts: tuple[int, ...]) -> tuple[Table, Table]:
    """Where middles and signs of tensors are, and where halves and signs are."""
    counts = [n // max(1, column) for n, column in zip(lengths, columns, strict=True)]
    signs = [start + 8 * count for start, count in zip(starts, counts, strict=True)]
    halves = [start + 4 * count for start, count in zip(starts, counts, strict=True)]
    sizes = [max(1, column) for column in columns]
    return Table(lengths, sizes, BLOCK, starts, [signs]), Table(lengths, sizes, BLOCK, halves, [signs])
