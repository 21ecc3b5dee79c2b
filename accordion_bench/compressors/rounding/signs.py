"""Signs as bits, alone or with the mean magnitude of every bucket."""

import torch
from torch import Tensor

from accordion_bench.compressors import packed_codes
from accordion_bench.compressors.rounding.passes import Passes, passes_on, refuse_non_finite
from accordion_bench.compressors.rounding.tiling import Buffers, bucket_count, bucket_views, tiles


def encode_signs(x_R: Tensor, passes: Passes | None = None) -> Tensor:
    """Signs of rows [R, N] as bits, 1 = negative (0.0 and -0.0 are positive): uint8 [R, ceil(N / 8)].

    Args:
        x_R: coordinates.
        passes: who makes them; None = as fits the device.

    Raises:
        NonFiniteRow: a row holds NaN or infinity.
    """
    passes = passes or passes_on(x_R.device)
    rows, n = x_R.shape
    message_R = torch.empty(rows, packed_codes.code_bytes(n, 2), dtype=torch.uint8, device=x_R.device)
    buffers = Buffers(rows, n, passes.tile, x_R.device, torch.float32, torch.uint8)
    passes.refuse_rows(x_R)
    for row, column in tiles(rows, n, passes.tile):
        x = x_R[row, column]
        single, negative = buffers(x.shape)
        x = x if x.dtype == torch.float32 else single.copy_(x)
        passes.refuse_tile(x, row.start)
        passes.negative_(negative, x)
        passes.store_(message_R[row, packed_codes.code_place(column, 2)], negative, 2)
    return message_R


def encode_scaled_signs(x_R: Tensor, bucket_size: int | None, passes: Passes | None = None) -> tuple[Tensor, Tensor]:
    """Signs of rows [R, N] as bits and the mean magnitude of each bucket, its l1 norm over its size, in one pass.

    Args:
        x_R: coordinates.
        bucket_size: of consecutive ones; None = a whole row.
        passes: who makes them; None = as fits the device.

    Returns:
        (uint8 [R, ceil(N / 8)], float32 [R, m]).

    Raises:
        NonFiniteRow: a row holds NaN or infinity.
    """
    passes = passes or passes_on(x_R.device)
    rows, n = x_R.shape
    size, m = bucket_size or n, bucket_count(n, bucket_size)
    message_R = torch.empty(rows, packed_codes.code_bytes(n, 2), dtype=torch.uint8, device=x_R.device)
    sums_R = torch.zeros(rows, m, dtype=torch.float64, device=x_R.device)
    buffers = Buffers(rows, n, passes.tile, x_R.device, torch.float32, torch.uint8)
    for row, column in tiles(rows, n, passes.tile):
        x = x_R[row, column]
        single, negative = buffers(x.shape)
        x = x if x.dtype == torch.float32 else single.copy_(x)
        passes.negative_(negative, x)
        passes.store_(message_R[row, packed_codes.code_place(column, 2)], negative, 2)
        for part, sums in bucket_views(torch.abs(x, out=single), sums_R, row, column.start, size):
            sums += passes.sum(part)
    lengths = torch.full((m,), size, device=x_R.device)
    lengths[m - 1 :] = n - (m - 1) * size
    means_R = (sums_R / lengths).float()
    refuse_non_finite(means_R)
    return message_R, means_R
