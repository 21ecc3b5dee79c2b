"""Encoding of coordinates on a CPU: random numbers, rounding, and packing in the format of `codecs.packed_codes`."""

import numpy as np
from torch import Tensor

from accordion_bench.tensors.kernels import dense_kernels as kinds
from accordion_bench.tensors.kernels.compiled import array_at, bits_of, compiled, f32, float_of, owner, u8, u32, u64
from accordion_bench.tensors.kernels.dense_kernels import Coordinates, Encoding, array_like
from accordion_bench.tensors.kernels.table import BUCKET, CODES, MORE, SIZE, TILE, N, Table, over_tiles
from accordion_bench.tensors.keyed_rng import BLOCK, lane_words

MANTISSA = 23
LANES = lane_words()
_GOLDEN, _FIRST, _SECOND = u64(0x9E3779B97F4A7C15), u64(0xBF58476D1CE4E5B9), u64(0x94D049BB133111EB)
COUNTED = 16  # with more thresholds, a binary search is faster than comparisons one by one


@compiled
def block_key(stream, block):  # type: ignore[no-untyped-def]
    """Word and odd factor of a block of a stream; see `keyed_rng.blocks_of`."""
    z = (stream + u64(block) + u64(1)) * _GOLDEN
    z = (z ^ (z >> u64(30))) * _FIRST
    z = (z ^ (z >> u64(27))) * _SECOND
    z = z ^ (z >> u64(31))
    return u32(z & u64(0xFFFFFFFF)), u32(z >> u64(32) & u64(0xFFFFFFF8) | u64(5))


@compiled
def integer(lane, word, factor, shift):  # type: ignore[no-untyped-def]
    """Leading 32 - shift bits of a random word."""
    return u32(u32(lane ^ word) * factor) >> shift  # numba widens uint32 to 64 bits without the mask


@compiled
def draw(lanes, word, factor, bits, out):  # type: ignore[no-untyped-def]
    """Write random integers below 2^bits, as float32, for the first lanes of a block to out; bits at most 24."""
    shift = u32(32 - bits)
    for i in range(out.size):
        out[i] = f32(np.int32(integer(lanes[i], word, factor, shift)))


# ---- packing


@compiled
def width_of(K):  # type: ignore[no-untyped-def]
    """Return the number of bits of a code below K; ternary codes are an exception."""
    width = 1
    while (1 << width) < K:
        width += 1
    return width


@compiled
def packed_bytes(n, K):  # type: ignore[no-untyped-def]
    """Return the number of bytes of n codes below K."""
    if K == 3:
        return (n + 4) // 5
    width = width_of(K)
    if 8 % width == 0:
        return (n + 8 // width - 1) // (8 // width)
    return width * ((n + 7) // 8)


@compiled
def pack(codes, n, K, out):  # type: ignore[no-untyped-def]
    """Pack the first n codes; the buffer must have 39 more codes, which are overwritten with zeros."""
    for i in range(n, n + 39):
        codes[i] = u8(0)
    width = width_of(K)
    if K == 3:
        for g in range(out.size):
            c = codes[5 * g : 5 * g + 5]
            out[g] = c[0] + u8(3) * c[1] + u8(9) * c[2] + u8(27) * c[3] + u8(81) * c[4]
    elif width == 1:
        for g in range(out.size):
            c, byte = codes[8 * g : 8 * g + 8], u8(0)
            for k in range(8):
                byte |= c[k] << u8(k)
            out[g] = byte
    elif width == 2:
        for g in range(out.size):
            c = codes[4 * g : 4 * g + 4]
            out[g] = c[0] | c[1] << u8(2) | c[2] << u8(4) | c[3] << u8(6)
    elif width == 3:
        for g in range(out.size // 3):
            c, word = codes[8 * g : 8 * g + 8], u32(0)
            for k in range(8):
                word |= u32(c[k]) << u32(3 * k)
            o = out[3 * g : 3 * g + 3]
            o[0], o[1], o[2] = u8(word), u8(word >> u32(8)), u8(word >> u32(16))
    elif width == 4:
        for g in range(out.size):
            c = codes[2 * g : 2 * g + 2]
            out[g] = c[0] | c[1] << u8(4)
    elif width == 8:
        for g in range(out.size):
            out[g] = codes[g]
    else:
        for g in range(out.size // width):
            c, word = codes[8 * g : 8 * g + 8], u64(0)
            for k in range(8):
                word |= u64(c[k]) << u64(width * k)
            o = out[width * g : width * g + width]
            for byte in range(width):
                o[byte] = u8(word >> u64(8 * byte))


@compiled
def unpack(message, K, codes):  # type: ignore[no-untyped-def]
    """Unpack all codes in the bytes; inverse of `pack`."""
    width = width_of(K)
    if K == 3:
        for g in range(message.size):
            c, byte = codes[5 * g : 5 * g + 5], u32(message[g])
            for k in range(5):
                c[k] = u8(byte % u32(3))
                byte //= u32(3)
    elif width == 1:
        every, own = u64(0x0101010101010101), u64(0x8040201008040201)  # a byte eight times, its bit k in byte k
        for g in range(message.size):
            c, spread = codes[8 * g : 8 * g + 8], u64(message[g]) * every & own
            for k in range(8):
                c[k] = u8(u8(spread >> u64(8 * k)) != 0)
    elif width == 2:
        for g in range(message.size):
            c, byte = codes[4 * g : 4 * g + 4], message[g]
            for k in range(4):
                c[k] = (byte >> u8(2 * k)) & u8(3)
    elif width == 3:
        for g in range(message.size // 3):
            c, b = codes[8 * g : 8 * g + 8], message[3 * g : 3 * g + 3]
            word = u32(b[0]) | u32(b[1]) << u32(8) | u32(b[2]) << u32(16)
            for k in range(8):
                c[k] = u8((word >> u32(3 * k)) & u32(7))
    elif width == 4:
        for g in range(message.size):
            c, byte = codes[2 * g : 2 * g + 2], message[g]
            c[0], c[1] = byte & u8(15), byte >> u8(4)
    elif width == 8:
        for g in range(message.size):
            codes[g] = message[g]
    else:
        mask = u64((1 << width) - 1)
        for g in range(message.size // width):
            c, b, word = codes[8 * g : 8 * g + 8], message[width * g : width * g + width], u64(0)
            for byte in range(width):
                word |= u64(b[byte]) << u64(8 * byte)
            for k in range(8):
                c[k] = u8((word >> u64(width * k)) & mask)


@compiled
def pack_signs(x, out):  # type: ignore[no-untyped-def]
    """Codes of signs; both zeros are positive."""
    whole = x.size // 64
    for g in range(whole):
        v, word = x[64 * g : 64 * g + 64], u64(0)
        for k in range(64):
            word |= u64(v[k] < 0) << u64(k)
        o = out[8 * g : 8 * g + 8]
        for byte in range(8):
            o[byte] = u8(word >> u64(8 * byte))
    for g in range(8 * whole, out.size):
        v, byte = x[8 * g : min(8 * g + 8, x.size)], u8(0)
        for k in range(v.size):
            byte |= u8(v[k] < 0) << u8(k)
        out[g] = byte


# ---- rounding


@compiled
def all_finite(x):  # type: ignore[no-untyped-def]
    infinite, bad = u32(0x7F800000), u32(0)
    for i in range(x.size):
        bad |= u32(bits_of(f32(x[i])) & infinite == infinite)
    return bad == 0


@compiled
def round_evenly(x, factor, scale, lanes, word, odd, bits, codes):  # type: ignore[no-untyped-def]
    """floor(r + s + u), with r clamped to [-s, s]."""
    shift, unit, top = u32(32 - bits), f32(2.0) ** f32(-bits), scale + scale
    for i in range(codes.size):
        u = f32(np.int32(integer(lanes[i], word, odd, shift))) * unit
        codes[i] = u8(np.int32(min(max(f32(x[i]) * factor + scale, f32(0)), top) + u))


@compiled
def normalise(x, factor, r):  # type: ignore[no-untyped-def]
    for i in range(r.size):
        r[i] = f32(x[i]) * factor


@compiled
def round_symmetrically(r, v, starts, widths, central, K, codes):  # type: ignore[no-untyped-def]
    """Code of the magnitude, in the half of the codebook of the sign; overwrites r."""
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
    """Number of ascending thresholds below each r."""
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
    """Number of thresholds below each r, by a binary search for its interval and one comparison within."""
    ends = np.full(256, np.inf, np.float32)  # padded to a power of two, so that no step is out of bounds
    ends[: starts.size] = starts
    for i in range(codes.size):
        low = 0
        for k in range(8):  # branch-free, because a branch would be unpredictable
            low += np.int64(ends[low + (128 >> k)] < r[i]) << (7 - k)
        codes[i] = u8(low) + u8(r[i] > starts[low] + v[i] * widths[low])


@compiled
def round_to_powers(x, v, K, codes):  # type: ignore[no-untyped-def]
    """Code of the exponent: that of float32 (K = 256); or 1 to 127 for 2^-63 to 2^63, 0 for zero (K = 128).

    v are random integers below 2^23.
    """
    smallest = f32(2.0) ** f32(-63)
    for i in range(codes.size):
        magnitude = abs(f32(x[i]))
        exponent = np.int32((bits_of(magnitude) + u32(v[i])) >> u32(MANTISSA))
        if K == 256:
            codes[i] = u8(min(exponent, 254))
        else:  # magnitudes below 2^-63 become 2^-63 or 0
            up = v[i] < magnitude * (f32(2.0) ** f32(63 + MANTISSA))
            codes[i] = u8(up) if magnitude < smallest else u8(min(exponent - 63, 127))


@compiled
def round_to_nearest(x, factor, codes):  # type: ignore[no-untyped-def]
    """int8; ties to even."""
    for i in range(codes.size):
        codes[i] = u8(np.int8(np.rint(f32(x[i]) * factor)))


@compiled
def round_at_random(x, factor, v, bits, codes):  # type: ignore[no-untyped-def]
    """int8, floor(step + u); u = v 2^-bits."""
    unit = f32(2.0) ** f32(-bits)
    for i in range(codes.size):
        step = np.floor(f32(x[i]) * factor + v[i] * unit)
        codes[i] = u8(np.int8(min(max(step, f32(-127)), f32(127))))


@compiled
def round_to_float(x, factor, dropped, bias, width, codes):  # type: ignore[no-untyped-def]
    """Numbers without `dropped` bits of the mantissa, with exponent bias `bias`; ties to even; sign at bit `width`."""
    power, smallest = (u32(128) - bias + dropped) << u32(23), (u32(128) - bias) << u32(23)
    below = (u32(1) << (dropped - u32(1))) - u32(1) - ((u32(127) - bias) << u32(23))
    for i in range(codes.size):
        bits = bits_of(f32(x[i]) * factor)
        magnitude = bits & u32(0x7FFFFFFF)
        # subnormal results: adding a power of two rounds to whole steps in the last bits
        small = bits_of(float_of(magnitude) + float_of(power)) - power
        large = u32(magnitude + ((magnitude >> dropped) & u32(1)) + below) >> dropped
        codes[i] = u8((small if magnitude < smallest else large) | (bits >> u32(31)) << width)


def encode(x: Coordinates, table: Table, message: Tensor, encoding: Encoding) -> np.ndarray:
    """See `DenseKernels.encode`; without scales, which `headers` writes."""
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
        if kind in (kinds.SIGNS, kinds.POWERS):
            finite[w, own] = all_finite(x)
            at = rows[t, CODES if kind == kinds.SIGNS else MORE] + begin // 8
            pack_signs(x, message[w, at : at + packed_bytes(x.size, 2)])
        if kind == kinds.SIGNS:
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
            if kind == kinds.EVEN:
                round_evenly(some, factor, scale, own_lanes, word, odd, bits, out)
            elif kind == kinds.INTEGER:
                round_to_nearest(some, factor, out)
            elif kind == kinds.RANDOM_INTEGER:
                draw(own_lanes, word, odd, bits, v[:n])
                round_at_random(some, factor, v[:n], bits, out)
            elif kind == kinds.E4M3:
                round_to_float(some, factor, u32(20), u32(7), u32(7), out)  # up to 448
            elif kind == kinds.E5M2:
                round_to_float(some, factor, u32(21), u32(15), u32(7), out)  # up to 57,344
            elif kind == kinds.E3M0:
                round_to_float(some, factor, u32(23), u32(7), u32(3), out)  # up to 1
            elif kind == kinds.POWERS:
                draw(own_lanes, word, odd, bits, v[:n])
                round_to_powers(some, v[:n], K, out)
            else:
                draw(own_lanes, word, odd, bits, v[:n])
                normalise(some, factor, r[:n])
                if kind == kinds.SYMMETRIC:
                    round_symmetrically(r[:n], v[:n], starts, widths, central, K, out)
                else:
                    count_below(r[:n], v[:n], starts, widths, out)
            left = right
        at = rows[t, CODES] + packed_bytes(begin, K)
        pack(codes, end - begin, K, message[w, at : at + packed_bytes(end - begin, K)])
