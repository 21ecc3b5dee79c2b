"""Sums in 16 bits: shares of workers in a mean, as float16 or bfloat16.

Tensor suffixes: W local workers, T tensors, N coordinates of one, B of all.
"""

import importlib
import itertools
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from accordion_bench.tensors import kernels
from accordion_bench.tensors.kernels import on_gpu
from accordion_bench.tensors.kernels.table import Table
from accordion_bench.tensors.same_shape import empty_vector

TILE = 1 << 14  # coordinates per tile; fits into the cache of a CPU


@lru_cache(64)
def largest_share(workers: int, dtype: torch.dtype) -> float:
    """Return the largest share, such that sums of `workers` shares in any order do not overflow the dtype."""
    most = torch.finfo(dtype).max
    if workers > 1:  # the rounding of the limit and of A - 1 additions may each increase the sum by eps / 2
        most /= workers * (1 + torch.finfo(dtype).eps / 2) ** workers
    return float(torch.tensor(most, dtype=dtype))


def share(x_W: Tensor, workers: int, dtype: torch.dtype) -> Tensor:
    """Return the share of each worker in a sum in `dtype`: x / A, clamped so that sums of A shares cannot overflow."""
    share_W = (x_W if workers == 1 else x_W / workers).to(dtype)
    if dtype == torch.float16:  # bfloat16 has the range of float32
        most = largest_share(workers, dtype)
        share_W = share_W.clamp_(-most, most)
    return share_W


def sum_of_shares(xs_W: Sequence[Tensor], workers: int, dtype: torch.dtype) -> Tensor:
    """Return the sum of the local workers' shares of several tensors, concatenated: [B] in `dtype`.

    Shares are summed in float32 in the order of the workers, and the sum is rounded once.

    Args:
        xs_W: tensors [W, ...], at least one, all of one dtype.
        workers: number of workers of the run, A.
        dtype: float16 or bfloat16.
    """
    if kernel := _kernels_for(xs_W, dtype):
        rows_W, table = _with_table(xs_W)
        total_B = empty_vector(sum(x_W[0].numel() for x_W in xs_W), dtype, xs_W[0].device)
        kernel.sum_of_shares(rows_W, table, workers, largest_share(workers, dtype), total_B)
        return total_B
    share_WB = share(side_by_side(xs_W), workers, dtype)
    if len(share_WB) == 1:
        return share_WB[0]
    total_B = torch.zeros_like(share_WB[0], dtype=torch.float32)
    for share_B in share_WB:
        total_B += share_B
    return total_B.to(dtype)


def widened(narrow_B: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a result of `sum_of_shares`, or a sum of such results, in float32 or float64."""
    wide_B = empty_vector(len(narrow_B), dtype, narrow_B.device)
    kernel = _kernels_for([wide_B], narrow_B.dtype)
    if kernel is None:
        return wide_B.copy_(narrow_B)
    kernel.widen(narrow_B, wide_B)
    return wide_B


def subtract_shares_(targets_W: Sequence[Tensor], xs_W: Sequence[Tensor], workers: int, dtype: torch.dtype) -> None:
    """Subtract A x the shares of its tensor, as other workers decode them, from each target [W, ...] in place."""
    if not targets_W:
        return
    kernel = _kernels_for([*targets_W, *xs_W], dtype) if targets_W[0].device.type == "cpu" else None
    if kernel is not None and all(map(_rows_lie_dense, targets_W)):
        kernel.subtract_shares(targets_W, *_with_table(xs_W), workers, largest_share(workers, dtype), dtype)
        return
    share_WB = share(side_by_side(xs_W), workers, dtype).to(targets_W[0].dtype)
    parts = share_WB.split([x_W[0].numel() for x_W in xs_W], dim=1)
    shares = [part.view(x_W.shape) for part, x_W in zip(parts, xs_W, strict=True)]
    torch._foreach_sub_(list(targets_W), shares, alpha=workers)


def side_by_side(xs_W: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors [W, ...] as [W, B]."""
    return torch.cat([x_W.reshape(len(x_W), -1) for x_W in xs_W], dim=1)


def _kernels_for(xs_W: Sequence[Tensor], dtype: torch.dtype) -> ModuleType | None:
    """Return the module of kernels for shares of these tensors; None if torch computes them."""
    if on_gpu.usable(xs_W):
        return importlib.import_module(f"{on_gpu.__name__}.casts")
    if not kernels.usable(xs_W):
        return None
    from accordion_bench.tensors.kernels import casts

    return casts if dtype == torch.bfloat16 or casts.converts_float16() else None


def _rows_lie_dense(x_W: Tensor) -> bool:
    return x_W.is_contiguous() or x_W[0].is_contiguous()


def _with_table(xs_W: Sequence[Tensor]) -> tuple[list[Tensor], Table]:
    """Return tensors with dense rows, and the table of their shares."""
    rows_W = [x_W if _rows_lie_dense(x_W) else x_W.contiguous() for x_W in xs_W]
    return rows_W, _table(tuple(x_W[0].numel() for x_W in xs_W))


@lru_cache(64)
def _table(lengths: tuple[int, ...]) -> Table:
    starts = [2 * sum_ for sum_ in itertools.accumulate(lengths[:-1], initial=0)]
    return Table(lengths, [max(n, 1) for n in lengths], TILE, headers=starts, streams=[starts])
