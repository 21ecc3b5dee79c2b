"""Stochastic rounding to the levels of a codebook; see `compressors.rounding.thresholds` for the three ways."""

import numpy as np

from accordion_bench.tensors.counter_rng import BLOCK
from accordion_bench.tensors.kernels.compiled import array_at, compiled, f32, i64, owner, u8, u32
from accordion_bench.tensors.kernels.counter_hash import LANES, block_key, draw
from accordion_bench.tensors.kernels.packing import pack, packed_bytes
from accordion_bench.tensors.kernels.table import BUCKET, CODES, SIZE, TILE, N, Table
from accordion_bench.tensors.kernels.threads import over_tiles

EVEN, SYMMETRIC, ANY = range(3)
KINDS = {"even": EVEN, "symmetric": SYMMETRIC, "any": ANY}
COUNTED = 16  # up to so many thresholds each is compared with; beyond, a binary search is faster


def encode_levels(
    addresses: np.ndarray,
    table: Table,
    factors: np.ndarray,
    streams: np.ndarray,
    message: np.ndarray,
    like: np.ndarray,
    K: int,
    kind: str,
    scale: float,
    bits: int,
    starts: np.ndarray,
    widths: np.ndarray,
    central: np.ndarray,
) -> None:
    """Codes of coordinates that are normalised by a factor for each bucket, into the messages [W, B].

    Args:
        addresses: of the coordinates, [W, T].
        table: lengths, buckets, and where the codes go.
        factors: float32 [W, M].
        streams: of random numbers, uint64 [W, T].
        message: uint8 [W, B].
        like: an array of the coordinates' type; they are read as float32.
        K, kind, scale, bits: see `compressors.rounding.thresholds.Rounding`.
        starts, widths: of the thresholds.
        central: start and width of the threshold that decides on the sign; empty = zero does.
    """
    over_tiles(
        _encode_levels,
        len(addresses) * table.tiles,
        *(addresses, table.rows, table.tiles, table.tile, factors, streams, message, like, LANES),
        *(K, KINDS[kind], f32(scale), bits, starts, widths, central),
    )


@compiled
def _encode_levels(  # type: ignore[no-untyped-def]
    addresses, rows, tiles, tile, factors, streams, message, like, lanes,
    K, kind, scale, bits, starts, widths, central, first, last,
):  # fmt: skip
    codes, r, v = np.empty(tile + 40, np.uint8), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    t = 0
    for number in range(first, last):
        w, own = number // tiles, number % tiles
        t = owner(rows, TILE, own, t)
        begin = (own - rows[t, TILE]) * tile
        end, size = min(begin + tile, rows[t, N]), rows[t, SIZE]
        x = array_at(addresses[w, t], rows[t, N], like)
        for start in range(begin, end, BLOCK):
            stop = min(start + BLOCK, end)
            word, odd = block_key(streams[w, t], start // BLOCK)
            left = start
            while left < stop:
                bucket = left // size
                right = min((bucket + 1) * size, stop)
                factor = factors[w, rows[t, BUCKET] + bucket]
                some, out = x[left:right], codes[left - begin : right - begin]
                own_lanes = lanes[left - start : right - start]
                if kind == EVEN:
                    round_evenly(some, factor, scale, own_lanes, word, odd, bits, out)
                else:
                    draw(own_lanes, word, odd, bits, v[: out.size])
                    normalise(some, factor, r[: out.size])
                    if kind == SYMMETRIC:
                        round_symmetrically(r[: out.size], v[: out.size], starts, widths, central, K, out)
                    else:
                        count_below(r[: out.size], v[: out.size], starts, widths, out)
                left = right
        at = rows[t, CODES] + packed_bytes(begin, K)
        pack(codes, end - begin, K, message[w, at : at + packed_bytes(end - begin, K)])


@compiled
def round_evenly(x, factor, scale, lanes, word, odd, bits, codes):  # type: ignore[no-untyped-def]
    """floor(r + s + u), r cut to [-s, s]."""
    shift, unit, top = u32(32 - bits), f32(2.0) ** f32(-bits), scale + scale
    for i in range(codes.size):
        u = f32(np.int32(((lanes[i] ^ word) * odd) >> shift)) * unit
        codes[i] = u8(np.int32(min(max(f32(x[i]) * factor + scale, f32(0)), top) + u))


@compiled
def normalise(x, factor, r):  # type: ignore[no-untyped-def]
    for i in range(r.size):
        r[i] = f32(x[i]) * factor


@compiled
def round_symmetrically(r, v, starts, widths, central, K, codes):  # type: ignore[no-untyped-def]
    """The magnitude's code, and the sign's half of the codebook; overwrites r."""
    positive = np.empty(r.size, np.uint8)
    start, width = (central[0], central[1]) if central.size else (f32(0), f32(0))
    for i in range(r.size):
        positive[i] = u8(r[i] > start + v[i] * width)
    for i in range(r.size):
        r[i] = abs(r[i])
    count_below(r, v, starts, widths, codes)
    above = u8(K // 2)
    for i in range(codes.size):
        code = codes[i] + above
        codes[i] = code if positive[i] else u8(K - 1) - code


@compiled
def count_below(r, v, starts, widths, codes):  # type: ignore[no-untyped-def]
    """How many thresholds lie below each r; they ascend."""
    if starts.size > COUNTED:
        search(r, v, starts, widths, codes)
        return
    for i in range(codes.size):
        codes[i] = u8(r[i] > starts[0] + v[i] * widths[0])
    for j in range(1, starts.size):
        start, width = starts[j], widths[j]
        for i in range(codes.size):
            codes[i] += u8(r[i] > start + v[i] * width)


@compiled
def search(r, v, starts, widths, codes):  # type: ignore[no-untyped-def]
    """The same: thresholds of the intervals below that of r lie below it, those of intervals above do not."""
    ends = np.full(256, np.inf, np.float32)  # a power of two of them: no step leaves it
    ends[: starts.size] = starts
    for i in range(codes.size):
        low = 0
        for k in range(8):  # no branch, which nobody could foresee
            low += i64(ends[low + (128 >> k)] < r[i]) << (7 - k)
        codes[i] = u8(low) + u8(r[i] > starts[low] + v[i] * widths[low])
