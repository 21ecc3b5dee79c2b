"""Codes of a slice into the bytes of a message and back; the layout is that of `codecs.packed_codes`.

A group is what fills whole bytes: 8 codes, or 5 ternary ones. A slice is an array [groups, 8] of codes, whose last
columns are empty where codes are ternary.
"""

import triton
import triton.language as tl

GROUPS = tl.constexpr(256)  # of a slice


def slice_size(K: int) -> int:
    """Coordinates of a slice, for codes below K."""
    return GROUPS.value * (5 if K == 3 else 8)


@triton.constexpr_function
def width_of(K):  # type: ignore[no-untyped-def]
    """Bits of a code below K; ternary codes are the exception."""
    return max(1, (K - 1).bit_length())


@triton.constexpr_function
def group_bytes(K):  # type: ignore[no-untyped-def]
    """Bytes of a group."""
    return 1 if K == 3 else max(1, (K - 1).bit_length())


@triton.jit
def places(K: tl.constexpr):  # type: ignore[no-untyped-def]
    """The coordinates [groups, 8] of a slice, counted from its first, and which of these are any."""
    k = tl.arange(0, 8)[None, :]
    group: tl.constexpr = 5 if K == 3 else 8
    return tl.arange(0, GROUPS)[:, None] * group + k, k < group


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
    """Where the bytes of a slice are behind a tensor's first, [groups, 8], and which of these are any."""
    b = tl.arange(0, 8)[None, :]
    at = packed_bytes(begin, K) + tl.arange(0, GROUPS)[:, None] * group_bytes(K) + b
    return at, (b < group_bytes(K)) & (at < packed_bytes(n, K))


@triton.jit
def byte_shifts(K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a group's bytes in its word; 0 where there is no byte, since a shift beyond the word has no result."""
    b = tl.arange(0, 8)[None, :]
    return tl.where(b < group_bytes(K), 8 * b, 0)


@triton.jit
def powers_of_3(k):  # type: ignore[no-untyped-def]
    return tl.where(k == 0, 1, tl.where(k == 1, 3, tl.where(k == 2, 9, tl.where(k == 3, 27, 81))))


@triton.jit
def pack(codes, exists, begin, n, K: tl.constexpr, out):  # type: ignore[no-untyped-def]
    """Codes, int32 [groups, 8], as bytes of a tensor of n coordinates whose first byte is at `out`."""
    k = tl.arange(0, 8)[None, :]
    codes = tl.where(exists, codes, 0)
    if K == 3:
        words = tl.sum(codes * powers_of_3(k), axis=1)
    elif width_of(K) > 4:
        words = tl.sum(codes.to(tl.uint64) << (width_of(K) * k).to(tl.uint64), axis=1)
    else:
        words = tl.sum(codes.to(tl.uint32) << (width_of(K) * k).to(tl.uint32), axis=1)
    at, any_byte = byte_places(begin, n, K)
    tl.store(out + at, (words[:, None] >> byte_shifts(K).to(words.dtype)).to(tl.uint8), mask=any_byte)


@triton.jit
def unpack(message, begin, n, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """The inverse: codes, int32 [groups, 8]."""
    k = tl.arange(0, 8)[None, :]
    at, any_byte = byte_places(begin, n, K)
    own = tl.load(message + at, mask=any_byte, other=0)
    if K == 3:
        byte = tl.sum(own.to(tl.int32), axis=1)
        return (byte[:, None] // powers_of_3(k)) % 3
    elif width_of(K) > 4:
        words = tl.sum(own.to(tl.uint64) << byte_shifts(K).to(tl.uint64), axis=1)
        return (words[:, None] >> (width_of(K) * k).to(tl.uint64)).to(tl.int32) & ((1 << width_of(K)) - 1)
    else:
        words = tl.sum(own.to(tl.uint32) << byte_shifts(K).to(tl.uint32), axis=1)
        return (words[:, None] >> (width_of(K) * k).to(tl.uint32)).to(tl.int32) & ((1 << width_of(K)) - 1)
