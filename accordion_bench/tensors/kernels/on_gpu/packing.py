"""Packing and unpacking of the codes of a slice, in the format of `codecs.packed_codes`.

A group of codes fills whole bytes: 8 codes, or 5 ternary ones. A slice is an array [groups, 8] of codes; for ternary
codes the last 3 columns are unused.
"""

import triton
import triton.language as tl

GROUPS = tl.constexpr(256)  # of a slice


def slice_size(K: int) -> int:
    """Return the number of coordinates of a slice, for codes below K."""
    return GROUPS.value * (5 if K == 3 else 8)


@triton.constexpr_function
def width_of(K):  # type: ignore[no-untyped-def]
    """Bits of a code below K; ternary codes are an exception."""
    return max(1, (K - 1).bit_length())


@triton.constexpr_function
def group_bytes(K):  # type: ignore[no-untyped-def]
    """Bytes of a group."""
    return 1 if K == 3 else max(1, (K - 1).bit_length())


@triton.constexpr_function
def group_of(K):  # type: ignore[no-untyped-def]
    """Coordinates of a group."""
    return 5 if K == 3 else 8


@triton.constexpr_function
def codes_in_byte(K):  # type: ignore[no-untyped-def]
    """Codes below K per byte, if a byte contains whole codes; otherwise, and for ternary codes, 0."""
    return 0 if K == 3 or 8 % width_of(K) else 8 // width_of(K)


@triton.jit
def places(K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offsets of the coordinates [groups, 8] of a slice, and which exist."""
    k = tl.arange(0, 8)[None, :]
    return tl.arange(0, GROUPS)[:, None] * group_of(K) + k, k < group_of(K)


@triton.jit
def left_of(begin, n):  # type: ignore[no-untyped-def]
    """Number of coordinates, or bytes, from `begin` to the end n, at most that of a slice; int32."""
    return tl.minimum(n - begin, GROUPS * 8).to(tl.int32)


@triton.jit
def read_slice(x, begin, j, n, exists, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read coordinates at addresses `x` [groups, 8]; full slices without a mask, 16 bytes per load."""
    if K == 3:
        return tl.load(x, mask=exists & (j < left_of(begin, n)), other=0)
    else:
        if begin + GROUPS * 8 <= n:
            r = tl.load(x)
        else:
            r = tl.load(x, mask=j < left_of(begin, n), other=0)
        return r


@triton.jit
def write_slice(x, values, begin, j, n, exists, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write coordinates; inverse of `read_slice`."""
    if K == 3:
        tl.store(x, values, mask=exists & (j < left_of(begin, n)))
    else:
        if begin + GROUPS * 8 <= n:
            tl.store(x, values)
        else:
            tl.store(x, values, mask=j < left_of(begin, n))


@triton.jit
def packed_bytes(n, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bytes of n codes below K."""
    if K == 3:
        return (n + 4) // 5
    elif 8 % width_of(K) == 0:
        return (n + 8 // width_of(K) - 1) // (8 // width_of(K))
    else:
        return width_of(K) * ((n + 7) // 8)


@triton.jit
def byte_places(begin, n, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """First byte of a slice, offsets of its bytes from there, and which exist.

    Offsets are [bytes] if a byte contains whole codes or a group, otherwise [groups, 8].
    """
    first = packed_bytes(begin, K)
    left = left_of(first, packed_bytes(n, K))
    if codes_in_byte(K):
        at = tl.arange(0, GROUPS * 8 // codes_in_byte(K))
        return first, at, at < left
    elif K == 3:
        at = tl.arange(0, GROUPS)
        return first, at, at < left
    else:
        b = tl.arange(0, 8)[None, :]
        at = tl.arange(0, GROUPS)[:, None] * group_bytes(K) + b
        return first, at, (b < group_bytes(K)) & (at < left)


@triton.jit
def byte_shifts(K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Shifts of the bytes of a group in a word; 0 for missing bytes, since shifts beyond the word are undefined."""
    b = tl.arange(0, 8)[None, :]
    return tl.where(b < group_bytes(K), 8 * b, 0)


@triton.jit
def powers_of_3(k):  # type: ignore[no-untyped-def]
    return tl.where(k == 0, 1, tl.where(k == 1, 3, tl.where(k == 2, 9, tl.where(k == 3, 27, 81))))


@triton.jit
def by_power_of_3(byte, k):  # type: ignore[no-untyped-def]
    """byte // 3^k, by ceil(2^16 / 3^k)."""
    inverse = tl.where(k == 0, 65536, tl.where(k == 1, 21846, tl.where(k == 2, 7282, tl.where(k == 3, 2428, 810))))
    return (byte * inverse) >> 16


@triton.jit
def write_bytes(out, codes, left):  # type: ignore[no-untyped-def]
    """Write the first `left` codes, one byte each; four per store where their address allows it."""
    parts = tl.reshape(codes, [GROUPS * 2, 4]).to(tl.uint32) << (8 * tl.arange(0, 4))[None, :]
    words, i = tl.sum(parts, axis=1), tl.arange(0, GROUPS * 2)
    if (left == GROUPS * 8) & (out.to(tl.int64) % 4 == 0):
        tl.store(out.to(tl.pointer_type(tl.uint32)) + i, words)
    else:
        for byte in tl.static_range(4):
            tl.store(out + 4 * i + byte, (words >> (8 * byte)).to(tl.uint8), mask=4 * i < left - byte)


@triton.jit
def read_bytes(message, left):  # type: ignore[no-untyped-def]
    """Read `left` codes of one byte each, as words of four; inverse of `write_bytes`."""
    i = tl.arange(0, GROUPS * 2)
    if (left == GROUPS * 8) & (message.to(tl.int64) % 4 == 0):
        words = tl.load(message.to(tl.pointer_type(tl.uint32)) + i)
    else:
        words = tl.zeros([GROUPS * 2], tl.uint32)
        for byte in tl.static_range(4):
            own = tl.load(message + 4 * i + byte, mask=4 * i < left - byte, other=0)
            words |= own.to(tl.uint32) << (8 * byte)
    return words


@triton.jit
def pack(codes, begin, n, K: tl.constexpr, out):  # type: ignore[no-untyped-def]
    """Write codes, int32 [groups, 8], of a tensor of n coordinates whose first byte is at `out`.

    Codes of coordinates that do not exist must be 0 if a byte contains several codes.
    """
    k = tl.arange(0, 8)[None, :]
    first, at, any_byte = byte_places(begin, n, K)
    out += first
    if codes_in_byte(K) == 1:
        write_bytes(out, codes, left_of(begin, n))
        return
    if codes_in_byte(K):
        per: tl.constexpr = codes_in_byte(K)
        parts = tl.reshape(codes, [GROUPS * 8 // per, per]) << (width_of(K) * tl.arange(0, per))[None, :]
        tl.store(out + at, tl.sum(parts, axis=1).to(tl.uint8), mask=any_byte)
    elif K == 3:
        tl.store(out + at, tl.sum(codes * powers_of_3(k), axis=1).to(tl.uint8), mask=any_byte)
    else:
        WORD: tl.constexpr = tl.uint64 if width_of(K) > 4 else tl.uint32
        words = tl.sum(codes.to(WORD) << (width_of(K) * k).to(WORD), axis=1)
        tl.store(out + at, (words[:, None] >> byte_shifts(K).to(WORD)).to(tl.uint8), mask=any_byte)


@triton.jit
def unpack(message, begin, n, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read codes, int32 [groups, 8]; inverse of `pack`."""
    tl.static_assert(codes_in_byte(K) != 1)  # see `read_bytes`
    k = tl.arange(0, 8)[None, :]
    first, at, any_byte = byte_places(begin, n, K)
    own = tl.load(message + first + at, mask=any_byte, other=0)
    if codes_in_byte(K):
        per: tl.constexpr = codes_in_byte(K)
        parts = own.to(tl.int32)[:, None] >> (width_of(K) * tl.arange(0, per))[None, :]
        return tl.reshape(parts & ((1 << width_of(K)) - 1), [GROUPS, 8])
    elif K == 3:
        left = by_power_of_3(own.to(tl.int32)[:, None], k)
        return left - 3 * by_power_of_3(left, 1)
    else:
        WORD: tl.constexpr = tl.uint64 if width_of(K) > 4 else tl.uint32
        words = tl.sum(own.to(WORD) << byte_shifts(K).to(WORD), axis=1)
        return (words[:, None] >> (width_of(K) * k).to(WORD)).to(tl.int32) & ((1 << width_of(K)) - 1)
