"""Sums of decoded messages, straight from their bytes into the sum."""

import numpy as np

from accordion_bench.tensors.kernels.compiled import array_at, compiled, f32, owner
from accordion_bench.tensors.kernels.packing import packed_bytes, unpack
from accordion_bench.tensors.kernels.table import BUCKET, CODES, SIZE, TILE, N, Table
from accordion_bench.tensors.kernels.threads import over_tiles


def add_values(
    targets: np.ndarray,
    table: Table,
    scales: np.ndarray,
    message: np.ndarray,
    values: np.ndarray,
    like: np.ndarray,
    divisor: int,
) -> None:
    """target [R, N] += the sum, in order, of scale x values[code] of each sender; then / divisor.

    Sender a goes to row a mod R. Each product and each sum is rounded once.

    Args:
        targets: addresses of the sums, [R, T].
        table: lengths, buckets, and where the codes are.
        scales: float32 [A, M]; empty = 1.
        message: uint8 [A, B].
        values: what the codes stand for, float32 [K].
        like: an array of the type of the sums.
        divisor: of the whole, 1 for a sum.
    """
    padded = np.resize(values, 256)  # bytes from a stranger may hold codes that do not exist
    over_tiles(
        _add_values,
        len(targets) * table.tiles,
        *(targets, table.rows, table.tiles, table.tile, scales, message, len(values), padded, like, divisor),
    )


@compiled
def _add_values(  # type: ignore[no-untyped-def]
    targets, rows, tiles, tile, scales, message, K, values, like, divisor, first, last
):
    codes, t = np.empty(tile + 40, np.uint8), 0
    for number in range(first, last):
        r, own = number // tiles, number % tiles
        t = owner(rows, TILE, own, t)
        begin = (own - rows[t, TILE]) * tile
        end, size = min(begin + tile, rows[t, N]), rows[t, SIZE]
        total = array_at(targets[r, t], rows[t, N], like)[begin:end]
        at = rows[t, CODES] + packed_bytes(begin, K)
        for a in range(r, len(message), len(targets)):
            packed = message[a, at : at + packed_bytes(end - begin, K)]
            if K > 128:  # a byte each
                own_codes = packed
            else:
                own_codes = codes
                unpack(packed, K, codes)
            left = begin
            while left < end:
                bucket = left // size
                right = min((bucket + 1) * size, end)
                scale = scales[a, rows[t, BUCKET] + bucket] if scales.size else f32(1)
                some, out = own_codes[left - begin : right - begin], total[left - begin : right - begin]
                if K == 2:
                    add_either(some, scale * values[0], scale * values[1], out)
                else:
                    add_scaled(some, values, scale, out)
                left = right
        if divisor != 1:
            for i in range(total.size):
                total[i] = total[i] / total.dtype.type(divisor)


@compiled
def add_either(codes, zero, one, total):  # type: ignore[no-untyped-def]
    for i in range(total.size):
        total[i] += one if codes[i] else zero


@compiled
def add_scaled(codes, values, scale, total):  # type: ignore[no-untyped-def]
    for i in range(total.size):
        total[i] += scale * values[codes[i]]
