"""Stochastic rounding: coordinates as random codes of the levels around them, see `thresholds`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from accordion_bench.compressors import packed_codes
from accordion_bench.compressors.rounding.passes import Passes, passes_on, refuse_non_finite
from accordion_bench.compressors.rounding.thresholds import Rounding, Thresholds, rounding_to
from accordion_bench.compressors.rounding.tiling import Buffers, multiply_buckets, tiles
from accordion_bench.tensors.counter_rng import BLOCK, block_keys, fill_bits_

_ZERO = torch.zeros(())


class _Tile(NamedTuple):
    """Scratch of one tile: normalised coordinates, u 2^bits, thresholds; codes, comparisons, signs."""

    r: Tensor
    v: Tensor
    t: Tensor
    code: Tensor
    above: Tensor
    sign: Tensor


_TILE_TYPES = (*[torch.float32] * 3, *[torch.uint8] * 3)


def encode_levels(
    x_R: Tensor,
    norms_R: Tensor,
    bucket_size: int | None,
    levels: tuple[float, ...],
    keys: Sequence[int] | Tensor,
    passes: Passes | None = None,
) -> Tensor:
    """Codes of rows [R, N], rounded to norm x level at random without bias.

    Args:
        x_R: coordinates.
        norms_R: what each bucket is divided by, float32 [R, m].
        bucket_size: of consecutive coordinates; None = a whole row.
        levels: K ascending numbers from -1 to 1, at most 256.
        keys: one per row; coordinate i of a row depends on the row's key and on i alone, whatever the chunks. Or what
            `block_keys` makes of them.
        passes: who makes them; None = as fits the device.

    Returns:
        Packed codes, uint8 [R, code_bytes(N, K)].

    Raises:
        NonFiniteRow: a norm is not finite, and rows are on the CPU.

    Source: Alistarh et al. 2017 (arXiv 1610.02132) for even grids; Faghri et al. 2020 (arXiv 2010.12460) for any.
    """
    passes = passes or passes_on(x_R.device)
    rows, n = x_R.shape
    rounding = rounding_to(levels)
    refuse_non_finite(norms_R)
    factors_R = _factors(norms_R, rounding.scale)
    blocks_R = keys if isinstance(keys, Tensor) else block_keys(keys, 0, -(-n // BLOCK), x_R.device)
    message_R = torch.empty(rows, packed_codes.code_bytes(n, rounding.K), dtype=torch.uint8, device=x_R.device)
    buffers = Buffers(rows, n, passes.tile, x_R.device, *_TILE_TYPES)
    for row, column in tiles(rows, n, passes.tile):
        x = x_R[row, column]
        tile = _Tile(*buffers(x.shape))
        words = fill_bits_(tile.t.view(torch.int32), blocks_R[row, column.start // BLOCK :])
        passes.leading_bits_(words, rounding.bits)
        tile.v.copy_(words)
        x = x if x.dtype == torch.float32 else tile.r.copy_(x)
        multiply_buckets(x, factors_R, row, column.start, bucket_size or n, out=tile.r)
        _round_(tile, rounding, passes)
        passes.store_(message_R[row, packed_codes.code_place(column, rounding.K)], tile.code, rounding.K)
    return message_R


def _factors(norms_R: Tensor, scale: float) -> Tensor:
    """scale / norm, rounded up where else a coordinate as large as its norm would end below `scale`, its level."""
    exact, above = (torch.tensor(s) for s in (scale, np.nextafter(np.float32(scale), np.inf)))
    factors_R = torch.div(exact, norms_R)
    factors_R = torch.where(norms_R * factors_R < exact, torch.div(above, norms_R), factors_R)
    return factors_R.clamp_max_(torch.finfo(torch.float32).max)  # finite for norm 0: 0 times this is 0


def _round_(tile: _Tile, rounding: Rounding, passes: Passes) -> None:
    """Codes of normalised coordinates; overwrites them."""
    if rounding.kind == "even":
        tile.r.add_(rounding.scale).clamp_(0, 2 * rounding.scale).add_(tile.v, alpha=2.0**-rounding.bits)
        passes.truncate_(tile.code, tile.r)
    elif rounding.kind == "any":
        _count_(tile, rounding.intervals, passes)
    else:
        passes.greater_(tile.sign, tile.r, rounding.central.at(0, tile.v, tile.t) if rounding.central else _ZERO)
        tile.r.abs_()
        _count_(tile, rounding.intervals, passes)
        # code + K // 2 where positive, else K - 1 less that, as ~(code + K // 2) + K modulo 256
        mask = tile.sign.sub_(1)
        tile.code.add_(rounding.K // 2).bitwise_xor_(mask).add_(mask.bitwise_and_(rounding.K % 256))


def _count_(tile: _Tile, intervals: Thresholds, passes: Passes) -> None:
    """code = how many thresholds lie below r."""
    count = passes.thresholds_within(intervals.starts, tile.r)
    if count > passes.counted:
        j, threshold = intervals.around(tile.r, tile.v, tile.t)
        tile.code.copy_(j)
        passes.greater_(tile.above, tile.r, threshold)
        tile.code.add_(tile.above)
        return
    passes.greater_(tile.code, tile.r, intervals.at(0, tile.v, tile.t))
    for k in range(1, count):
        passes.greater_(tile.above, tile.r, intervals.at(k, tile.v, tile.t))
        tile.code.add_(tile.above)
