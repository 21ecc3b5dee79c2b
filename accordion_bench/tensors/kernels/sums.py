"""Sums of decoded messages on a CPU, in one read of the messages."""

import numpy as np
from torch import Tensor

from accordion_bench.tensors.kernels.compiled import array_at, bits_of, compiled, f32, float_of, owner, u8, u32
from accordion_bench.tensors.kernels.dense_kernels import Coordinates, Decoding, array_like
from accordion_bench.tensors.kernels.packing import packed_bytes, unpack
from accordion_bench.tensors.kernels.table import BUCKET, CODES, HEADER, MORE, SIZE, TILE, N, Table
from accordion_bench.tensors.kernels.threads import over_tiles


@compiled
def write_headers(scales, rows, message):  # type: ignore[no-untyped-def]
    """Write scales [W, M] into messages [W, B]."""
    for w in range(len(message)):
        for t in range(len(rows) - 1):
            for b in range(rows[t + 1, BUCKET] - rows[t, BUCKET]):
                bits = bits_of(scales[w, rows[t, BUCKET] + b])
                out = message[w, rows[t, HEADER] + 4 * b :][:4]
                for byte in range(4):
                    out[byte] = u8(bits >> u32(8 * byte))


@compiled
def read_headers(message, rows, alpha):  # type: ignore[no-untyped-def]
    """Return the scales [A, M] of messages [A, B], times alpha."""
    scales = np.empty((len(message), rows[-1, BUCKET]), np.float32)
    for a in range(len(message)):
        for t in range(len(rows) - 1):
            for b in range(rows[t + 1, BUCKET] - rows[t, BUCKET]):
                own, bits = message[a, rows[t, HEADER] + 4 * b :][:4], u32(0)
                for byte in range(4):
                    bits |= u32(own[byte]) << u32(8 * byte)
                scales[a, rows[t, BUCKET] + b] = float_of(bits) * f32(alpha)
    return scales


def add_values(targets: Coordinates, table: Table, message: Tensor, scales: Tensor, decoding: Decoding) -> None:
    """See `DenseKernels.add_values`; with alpha x scales of all buckets, float32 [A, M]."""
    K = len(decoding.values[0])
    book = np.pad(decoding.values[0], (0, 256 - K), mode="edge")  # malformed messages may contain unknown codes
    signs = decoding.values[1] if len(decoding.values) > 1 else book[:0]
    middles = np.zeros((0, 0), np.float32) if decoding.middles is None else decoding.middles.numpy()
    like = array_like(targets.like)
    over_tiles(
        _add_values,
        len(targets.addresses) * table.tiles,
        *(targets.addresses, table.rows, table.tiles, table.tile, scales.numpy(), message.numpy(), K, book, signs),
        *(middles, like, like.dtype.type(decoding.divisor), decoding.empty),
    )


@compiled
def _add_values(  # type: ignore[no-untyped-def]
    targets, rows, tiles, tile, scales, message, K, values, signs, middles, like, divisor, empty, first, last
):
    codes, negative, t = np.empty(tile + 40, np.uint8), np.empty(tile + 40, np.uint8), 0
    for number in range(first, last):
        r, own = number // tiles, number % tiles
        t = owner(rows, TILE, own, t)
        begin = (own - rows[t, TILE]) * tile
        end, size = min(begin + tile, rows[t, N]), rows[t, SIZE]
        total = array_at(targets[r, t], rows[t, N], like)[begin:end]
        if empty:
            total[:] = 0
        at = rows[t, CODES] + packed_bytes(begin, K)
        for a in range(r, len(message), len(targets)):
            packed = message[a, at : at + packed_bytes(end - begin, K)]
            if K > 128:  # a byte each
                own_codes = packed
            else:
                own_codes = codes
                unpack(packed, K, codes)
            if signs.size:
                more = rows[t, MORE] + begin // 8
                unpack(message[a, more : more + packed_bytes(end - begin, 2)], 2, negative)
            left = begin
            while left < end:
                bucket = left // size
                right = min((bucket + 1) * size, end)
                scale = scales[a, rows[t, BUCKET] + bucket]
                some, out = own_codes[left - begin : right - begin], total[left - begin : right - begin]
                if signs.size:
                    add_signed(some, values, negative[left - begin : right - begin], signs, scale, out)
                elif K == 2:
                    middle = middles[a, rows[t, BUCKET] + bucket] if middles.size else f32(0)
                    add_either(some, middle + scale * values[0], middle + scale * values[1], out)
                else:
                    add_scaled(some, values, scale, out)
                left = right
        if divisor != 1:
            for i in range(total.size):
                total[i] = total[i] / divisor


@compiled
def add_either(codes, zero, one, total):  # type: ignore[no-untyped-def]
    for i in range(total.size):
        total[i] += one if codes[i] else zero


@compiled
def add_signed(codes, values, negative, signs, scale, total):  # type: ignore[no-untyped-def]
    for i in range(total.size):
        total[i] += scale * (values[codes[i]] * signs[negative[i]])


@compiled
def add_scaled(codes, values, scale, total):  # type: ignore[no-untyped-def]
    for i in range(total.size):
        total[i] += scale * values[codes[i]]
