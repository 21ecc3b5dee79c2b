"""Sums in 16 bits: shares of workers in a mean, as float16 or bfloat16.

Tensor suffixes: W local workers, T tensors, N coordinates of one, B of all.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors import kernels, large_pages
from accordion_bench.tensors.kernels import on_gpu

if TYPE_CHECKING:
    from accordion_bench.tensors.kernels.table import Table

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
    if _usable(xs_W, dtype):
        return _summed_by_kernel(xs_W, workers, dtype)
    if on_gpu.usable(xs_W) and all(map(_rows_lie_dense, xs_W)):
        return _summed_on_gpu(xs_W, workers, dtype)
    share_WB = share(side_by_side(xs_W), workers, dtype)
    if len(share_WB) == 1:
        return share_WB[0]
    total_B = torch.zeros_like(share_WB[0], dtype=torch.float32)
    for share_B in share_WB:
        total_B += share_B
    return total_B.to(dtype)


def widened(narrow_B: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a result of `sum_of_shares`, or a sum of such results, in float32 or float64."""
    wide_B = large_pages.empty(len(narrow_B), dtype, narrow_B.device)
    if on_gpu.usable([wide_B]):
        from accordion_bench.tensors.kernels.on_gpu import casts as kernel

        kernel.widen(narrow_B, wide_B)
        return wide_B
    if not _usable([wide_B], narrow_B.dtype):
        return wide_B.copy_(narrow_B)
    from accordion_bench.tensors.kernels import casts
    from accordion_bench.tensors.kernels.threads import over_tiles

    half, tiles = narrow_B.dtype == torch.float16, -(-len(narrow_B) // TILE)
    over_tiles(casts.widen, tiles, _bits(narrow_B), half, TILE, wide_B.numpy())
    return wide_B


def subtract_shares_(targets_W: Sequence[Tensor], xs_W: Sequence[Tensor], workers: int, dtype: torch.dtype) -> None:
    """Subtract A x the shares of its tensor, as other workers decode them, from each target [W, ...] in place."""
    if not targets_W:
        return
    if _usable([*targets_W, *xs_W], dtype) and all(_rows_lie_dense(target_W) for target_W in targets_W):
        _subtracted_by_kernel_(targets_W, xs_W, workers, dtype)
        return
    share_WB = share(side_by_side(xs_W), workers, dtype).to(targets_W[0].dtype)
    parts = share_WB.split([x_W[0].numel() for x_W in xs_W], dim=1)
    shares = [part.view(x_W.shape) for part, x_W in zip(parts, xs_W, strict=True)]
    torch._foreach_sub_(list(targets_W), shares, alpha=workers)


def side_by_side(xs_W: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors [W, ...] as [W, B]."""
    return torch.cat([x_W.reshape(len(x_W), -1) for x_W in xs_W], dim=1)


# ---- with kernels


def _usable(xs_W: Sequence[Tensor], dtype: torch.dtype) -> bool:
    if not kernels.usable(xs_W):
        return False
    from accordion_bench.tensors.kernels import casts

    return dtype == torch.bfloat16 or casts.converts_float16()


def _rows_lie_dense(x_W: Tensor) -> bool:
    return x_W.is_contiguous() or x_W[0].is_contiguous()


def _summed_by_kernel(xs_W: Sequence[Tensor], workers: int, dtype: torch.dtype) -> Tensor:
    from accordion_bench.tensors.kernels import casts
    from accordion_bench.tensors.kernels.table import addresses
    from accordion_bench.tensors.kernels.threads import over_tiles

    rows_W = [x_W if _rows_lie_dense(x_W) else x_W.contiguous() for x_W in xs_W]
    table = _table(tuple(x_W.numel() // len(x_W) for x_W in rows_W))
    total_B = large_pages.empty(int(table.entries.sum()), dtype, rows_W[0].device)
    cast = _as_kernels_take_it(rows_W[0], workers, dtype)
    over_tiles(casts.add_up_shares, table.tiles, addresses(rows_W), table.rows, table.tile, *cast, _bits(total_B))
    return total_B


def _summed_on_gpu(xs_W: Sequence[Tensor], workers: int, dtype: torch.dtype) -> Tensor:
    from accordion_bench.tensors.kernels.on_gpu import casts as kernel

    rows_W = [x_W.reshape(len(x_W), -1) for x_W in xs_W]
    table = _table(tuple(x_W.shape[1] for x_W in rows_W))
    total_B = torch.empty(int(table.entries.sum()), dtype=dtype, device=rows_W[0].device)
    kernel.sum_of_shares(rows_W, table, workers, largest_share(workers, dtype), total_B)
    return total_B


def _subtracted_by_kernel_(
    targets_W: Sequence[Tensor], xs_W: Sequence[Tensor], workers: int, dtype: torch.dtype
) -> None:
    from accordion_bench.tensors.kernels import casts
    from accordion_bench.tensors.kernels.table import addresses
    from accordion_bench.tensors.kernels.threads import over_tiles

    rows_W = [x_W if _rows_lie_dense(x_W) else x_W.contiguous() for x_W in xs_W]
    table = _table(tuple(x_W.numel() // len(x_W) for x_W in rows_W))
    cast = _as_kernels_take_it(rows_W[0], workers, dtype)
    over_tiles(
        casts.subtract_shares, table.tiles, addresses(targets_W), addresses(rows_W), table.rows, table.tile, *cast
    )


def _bits(narrow_B: Tensor) -> np.ndarray:
    return narrow_B.view(torch.uint16).numpy()


@lru_cache(64)
def _table(lengths: tuple[int, ...]) -> "Table":
    """Return the table of the shares of tensors of these lengths; cached."""
    from accordion_bench.tensors.kernels.table import Table

    starts = [2 * sum_ for sum_ in itertools.accumulate(lengths[:-1], initial=0)]
    return Table(lengths, [max(n, 1) for n in lengths], TILE, headers=starts, streams=[starts])


def _as_kernels_take_it(like: Tensor, workers: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return number of workers, largest share, whether dtype is float16, and an array of the tensors' dtype."""
    empty = np.empty(0, np.float32 if like.dtype == torch.float32 else np.float64)
    return empty.dtype.type(workers), np.float32(largest_share(workers, dtype)), dtype == torch.float16, empty
