"""Coordinates to packed codes: tile by tile, bucket by bucket."""

import numpy as np
from torch import Tensor

from accordion_bench.tensors.counter_rng import BLOCK
from accordion_bench.tensors.kernels.compiled import array_at, compiled, f32, owner
from accordion_bench.tensors.kernels.counter_hash import LANES, block_key, draw
from accordion_bench.tensors.kernels.dense_kernels import Coordinates, Encoding, array_like
from accordion_bench.tensors.kernels.eight_bit import (
    round_at_random,
    round_to_e3m0,
    round_to_e4m3,
    round_to_e5m2,
    round_to_nearest,
)
from accordion_bench.tensors.kernels.levels import count_below, normalise, round_evenly, round_symmetrically
from accordion_bench.tensors.kernels.packing import pack, packed_bytes
from accordion_bench.tensors.kernels.powers import round_to_powers
from accordion_bench.tensors.kernels.rounding import (
    E3M0,
    E4M3,
    E5M2,
    EVEN,
    INTEGER,
    POWERS,
    RANDOM_INTEGER,
    SIGNS,
    SYMMETRIC,
)
from accordion_bench.tensors.kernels.signs import all_finite, pack_signs
from accordion_bench.tensors.kernels.table import BUCKET, CODES, MORE, SIZE, TILE, N, Table
from accordion_bench.tensors.kernels.threads import over_tiles


def encode(x: Coordinates, table: Table, message: Tensor, encoding: Encoding) -> np.ndarray:
    """See `DenseKernels.encode`; without the scales, which `headers` writes."""
    kind, K, bits, scale, *thresholds = encoding.rounding
    streams = encoding.streams.numpy().view(np.uint64) if encoding.streams.numel() else np.empty((0, 0), np.uint64)
    finite = np.ones((len(message), table.tiles), np.bool_)
    over_tiles(
        _encode,
        finite.size,
        *(x.addresses, table.rows, table.tile, encoding.factors.contiguous().numpy(), streams, message.numpy()),
        *(array_like(x.like), LANES, finite, kind, K, bits, f32(scale), *thresholds),
    )
    of_tensors = np.ones((len(message), len(table.rows) - 1), bool)
    for w, tile in zip(*np.nonzero(~finite), strict=True):
        of_tensors[w, np.searchsorted(table.rows[1:, TILE], tile, side="right")] = False
    return of_tensors


@compiled
def _encode(  # type: ignore[no-untyped-def]
    addresses, rows, tile, factors, streams, message, like, lanes, finite,
    kind, K, bits, scale, starts, widths, central, first, last,
):  # fmt: skip
    codes, r, v = np.empty(tile + 40, np.uint8), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    t, tiles = 0, finite.shape[1]
    for number in range(first, last):
        w, own = number // tiles, number % tiles
        t = owner(rows, TILE, own, t)
        begin = (own - rows[t, TILE]) * tile
        end = min(begin + tile, rows[t, N])
        x = array_at(addresses[w, t], rows[t, N], like)[begin:end]
        if kind in (SIGNS, POWERS):
            finite[w, own] = all_finite(x)
            at = rows[t, CODES if kind == SIGNS else MORE] + begin // 8
            pack_signs(x, message[w, at : at + packed_bytes(x.size, 2)])
        if kind == SIGNS:
            continue
        left = begin
        while left < end:
            size, block = rows[t, SIZE], left // BLOCK
            bucket = left // size
            right = min((bucket + 1) * size, (block + 1) * BLOCK, end)
            factor = factors[w, rows[t, BUCKET] + bucket] if factors.size else f32(1)
            n, some, out = right - left, x[left - begin : right - begin], codes[left - begin : right - begin]
            own_lanes = lanes[left - block * BLOCK :][:n]
            word, odd = block_key(streams[w, t], block) if bits else (np.uint32(0), np.uint32(1))
            if kind == EVEN:
                round_evenly(some, factor, scale, own_lanes, word, odd, bits, out)
            elif kind == INTEGER:
                round_to_nearest(some, factor, out)
            elif kind == RANDOM_INTEGER:
                draw(own_lanes, word, odd, bits, v[:n])
                round_at_random(some, factor, v[:n], bits, out)
            elif kind == E4M3:
                round_to_e4m3(some, factor, out)
            elif kind == E5M2:
                round_to_e5m2(some, factor, out)
            elif kind == E3M0:
                round_to_e3m0(some, factor, out)
            elif kind == POWERS:
                draw(own_lanes, word, odd, bits, v[:n])
                round_to_powers(some, v[:n], K, out)
            else:
                draw(own_lanes, word, odd, bits, v[:n])
                normalise(some, factor, r[:n])
                if kind == SYMMETRIC:
                    round_symmetrically(r[:n], v[:n], starts, widths, central, K, out)
                else:
                    count_below(r[:n], v[:n], starts, widths, out)
            left = right
        at = rows[t, CODES] + packed_bytes(begin, K)
        pack(codes, end - begin, K, message[w, at : at + packed_bytes(end - begin, K)])
