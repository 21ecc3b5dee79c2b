"""The norm of every bucket."""

import torch
from torch import Tensor

from accordion_bench.compressors.rounding.passes import Passes, passes_on
from accordion_bench.compressors.rounding.tiling import Buffers, bucket_count, bucket_views, tiles

NORMS = ("l1", "l2", "linf")


def bucket_norms(x_R: Tensor, bucket_size: int | None, norm: str, passes: Passes | None = None) -> Tensor:
    """The norm of each bucket of rows [R, N], accumulated in float64.

    Args:
        x_R: coordinates.
        bucket_size: of consecutive ones; None = a whole row.
        norm: `l1` (sum of magnitudes), `l2`, `linf` (largest magnitude).
        passes: who makes them; None = as fits the device.

    Returns:
        float32 [R, m]; NaN or infinity where the bucket holds such a value or its norm exceeds float32.
    """
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm}")
    passes = passes or passes_on(x_R.device)
    rows, n = x_R.shape
    sums_R = torch.zeros(rows, bucket_count(n, bucket_size), dtype=torch.float64, device=x_R.device)
    buffers = Buffers(rows, n, passes.tile, x_R.device, torch.float32, torch.float64)
    for row, column in tiles(rows, n, passes.tile):
        x = x_R[row, column]
        single, double = buffers(x.shape)
        if norm == "l2":
            terms = double.copy_(x if x.dtype == torch.float32 else single.copy_(x))
        else:
            terms = _magnitudes(x, single)
        for part, sums in bucket_views(terms, sums_R, row, column.start, bucket_size or n):
            if norm == "l2":
                sums += passes.sum_of_squares(part)[..., None]
            elif norm == "l1":
                sums += passes.sum(part)
            else:
                torch.maximum(sums, part.amax(-1, keepdim=True), out=sums)
    return (sums_R.sqrt_() if norm == "l2" else sums_R).float()


def _magnitudes(x: Tensor, out: Tensor) -> Tensor:
    return torch.abs(x, out=out) if x.dtype == torch.float32 else out.copy_(x).abs_()
