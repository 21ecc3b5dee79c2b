"""`DenseKernels` on a CPU, and sums of decoded messages in one read of the messages."""

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.kernels import encode as codes
from accordion_bench.tensors.kernels.compiled import array_at, compiled, f32, owner
from accordion_bench.tensors.kernels.dense_kernels import Coordinates, Decoding, Encoding, array_like
from accordion_bench.tensors.kernels.drawn import draw, gather, scatter
from accordion_bench.tensors.kernels.encode import packed_bytes, unpack
from accordion_bench.tensors.kernels.index_codes import put_value, value_at
from accordion_bench.tensors.kernels.norms import bucket_norms
from accordion_bench.tensors.kernels.table import BUCKET, CODES, HEADER, MORE, SIZE, TILE, N, Table, over_tiles

__all__ = ["add_values", "bucket_norms", "draw", "encode", "gather", "read_headers", "scatter", "write_headers"]


def write_headers(scales: Tensor, table: Table, message: Tensor) -> None:
    _write_headers(scales.numpy(), table.rows, message.numpy())


def read_headers(message: Tensor, table: Table, alpha: float) -> Tensor:
    return torch.from_numpy(_read_headers(message.numpy(), table.rows, alpha))


def encode(x: Coordinates, table: Table, message: Tensor, encoding: Encoding) -> np.ndarray:
    if encoding.scales is not None:
        write_headers(encoding.scales, table, message)
    return codes.encode(x, table, message, encoding)


def add_values(targets: Coordinates, table: Table, message: Tensor, decoding: Decoding) -> None:
    scales, alpha, K = decoding.scales, decoding.alpha, len(decoding.values[0])
    if scales is None:
        scales = read_headers(message, table, alpha)
    elif scales.numel():
        scales = (scales * alpha).contiguous()
    else:
        scales = torch.full((len(message), table.buckets), alpha)
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
def _write_headers(scales, rows, message):  # type: ignore[no-untyped-def]
    for w in range(len(message)):
        for t in range(len(rows) - 1):
            for b in range(rows[t + 1, BUCKET] - rows[t, BUCKET]):
                put_value(message[w], rows[t, HEADER] + 4 * b, scales[w, rows[t, BUCKET] + b])


@compiled
def _read_headers(message, rows, alpha):  # type: ignore[no-untyped-def]
    scales = np.empty((len(message), rows[-1, BUCKET]), np.float32)
    for a in range(len(message)):
        for t in range(len(rows) - 1):
            for b in range(rows[t + 1, BUCKET] - rows[t, BUCKET]):
                scales[a, rows[t, BUCKET] + b] = value_at(message[a], rows[t, HEADER] + 4 * b) * f32(alpha)
    return scales


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
