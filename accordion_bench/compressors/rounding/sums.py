"""Sums of decoded messages, straight from their bytes."""

from torch import Tensor

from accordion_bench.compressors import packed_codes
from accordion_bench.compressors.rounding.passes import Passes, passes_on
from accordion_bench.compressors.rounding.tiling import tiles


def add_levels_(
    total: Tensor,
    message_A: Tensor,
    norms_A: Tensor,
    bucket_size: int | None,
    levels: tuple[float, ...],
    passes: Passes | None = None,
) -> None:
    """total += sum over a, in order, of norm_a x level[code_a], each product and each sum rounded once.

    Args:
        total: [N], or [R, N]: then message a goes to row a mod R. float32 or float64.
        message_A: packed codes, uint8 [A, code_bytes(N, K)].
        norms_A: float32 [A, m]; negative ones subtract, norms over A give a mean.
        bucket_size: of consecutive coordinates; None = a whole row.
        levels: the K values of the codes.
        passes: who makes them; None = as fits the device.
    """
    passes = passes or passes_on(total.device)
    total_R = total[None] if total.ndim == 1 else total
    rows, n = total_R.shape
    K, size = len(levels), bucket_size or n
    for row, column in tiles(rows, n, passes.tile):
        sums, place = total_R[row, column], packed_codes.code_place(column, K)
        for first in range(0, len(message_A), rows):
            senders = slice(first + row.start, first + row.stop)
            passes.add_decoded_(sums, message_A[senders, place], levels, norms_A[senders], column.start, size)


def add_signs_(
    total: Tensor, message_A: Tensor, scale_A: Tensor, bucket_size: int | None, passes: Passes | None = None
) -> None:
    """total += sum over a, in order, of scale_a x (-1 where the bit is set, else +1); arguments as `add_levels_`."""
    add_levels_(total, message_A, scale_A, bucket_size, (1.0, -1.0), passes)
