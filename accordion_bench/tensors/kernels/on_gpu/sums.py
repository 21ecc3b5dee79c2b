"""Sums of decoded messages on a GPU, in one read of the messages."""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors.kernels.dense_kernels import Coordinates, Decoding
from accordion_bench.tensors.kernels.on_gpu.launch import (
    BUCKET,
    CODES,
    DIFFERENT,
    HEADER,
    MORE,
    SIZE,
    TYPES,
    N,
    aligned,
    buckets_at,
    buckets_on,
    launch,
    of_lanes,
    on_device,
    rows_on,
    slice_of,
    slices_on,
    stride,
)
from accordion_bench.tensors.kernels.on_gpu.packing import (
    GROUPS,
    group_of,
    left_of,
    places,
    read_bytes,
    read_slice,
    slice_size,
    unpack,
    write_slice,
)
from accordion_bench.tensors.kernels.table import Table, bucket_size

TOGETHER = 256  # buckets per program
INTEGERS = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)  # values of the codes of int8
POWERS = (np.arange(256, dtype=np.int32) << 23).view(np.float32)  # values of the exponents of float32


def write_headers(scales: Tensor, table: Table, message: Tensor) -> None:
    """See `DenseKernels.write_headers`. One launch."""
    grid = (triton.cdiv(table.buckets, TOGETHER), len(message))
    there = message.device
    args = (scales, table.buckets, buckets_on(table, there), message, message.stride(0))
    launch(_write_headers, grid, there, *args, TOGETHER=TOGETHER)


def read_headers(message: Tensor, table: Table, alpha: float) -> Tensor:
    """See `DenseKernels.read_headers`. One launch."""
    there = message.device
    scales = torch.empty(len(message), table.buckets, device=there)
    grid = (triton.cdiv(table.buckets, TOGETHER), len(message))
    args = (scales, table.buckets, buckets_on(table, there), message, message.stride(0), float(alpha))
    launch(_read_headers, grid, there, *args, TOGETHER=TOGETHER)
    return scales


@triton.jit
def write_float(out, number, exists):  # type: ignore[no-untyped-def]
    """Write float32 numbers at unaligned addresses."""
    bits = number.to(tl.uint32, bitcast=True)
    for byte in tl.static_range(4):
        tl.store(out + byte, (bits >> (8 * byte)).to(tl.uint8), mask=exists)


@triton.jit
def read_float(message, exists):  # type: ignore[no-untyped-def]
    """Read float32 numbers at unaligned addresses."""
    bits = tl.load(message, mask=exists, other=0).to(tl.uint32)
    for byte in tl.static_range(1, 4):
        bits |= tl.load(message + byte, mask=exists, other=0).to(tl.uint32) << (8 * byte)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _write_headers(scales, M, at, message, row_bytes, TOGETHER: tl.constexpr):  # type: ignore[no-untyped-def]
    w = tl.program_id(1).to(tl.int64)
    b = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    scale = tl.load(scales + w * M + b, mask=b < M, other=0)
    write_float(message + w * row_bytes + tl.load(at + b, mask=b < M, other=0), scale, b < M)


@triton.jit
def _read_headers(scales, M, at, message, row_bytes, alpha, TOGETHER: tl.constexpr):  # type: ignore[no-untyped-def]
    a = tl.program_id(1).to(tl.int64)
    b = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    scale = read_float(message + a * row_bytes + tl.load(at + b, mask=b < M, other=0), b < M)
    tl.store(scales + a * M + b, scale * alpha, mask=b < M)


def add_values(targets: Coordinates, table: Table, message: Tensor, decoding: Decoding) -> None:
    """See `DenseKernels.add_values`. One launch; two if scales are in the message and block sizes differ."""
    there, (R, T), K = message.device, targets.addresses.shape, len(decoding.values[0])
    slices, scales = slices_on(table, slice_size(K), there), decoding.scales
    if scales is None and bucket_size(table) == DIFFERENT.value:  # reading their bytes per coordinate is slower
        scales = read_headers(message, table, 1.0)
    given = torch.empty(0, device=there) if scales is None else scales
    launch(
        _add_values,
        (len(slices), R),
        there,
        *(targets.on_device, T, rows_on(table, there), slices, given, stride(given)),
        *(float(decoding.alpha), given if decoding.middles is None else decoding.middles, table.buckets),
        *(message, message.stride(0), len(message), R, *books_on(decoding.values, there), float(decoding.divisor)),
        COLUMNS=table.rows.shape[1],
        TYPE=TYPES[targets.like.dtype],
        K=K,
        BOOK=book_of(decoding.values[0]),
        ALIGNED=aligned(targets.addresses, targets.like.dtype),
        BUCKET_SIZE=bucket_size(table),
        HEADED=scales is None,
        SCALED=given.numel() > 0,
        SIGNED=len(decoding.values) > 1,
        CENTRED=decoding.middles is not None,
        DIVIDED=decoding.divisor != 1,
        EMPTY=decoding.empty,
    )


def books_on(values: Sequence[np.ndarray], there: torch.device) -> tuple[Tensor, Tensor]:
    """Return the values of the codes of the first stream, padded to 256, and of the last stream."""
    book = np.pad(values[0], (0, 256 - len(values[0])), mode="edge")  # malformed messages may contain unknown codes
    return on_device(book.tobytes(), there), on_device(values[-1].tobytes(), there)


def book_of(values: np.ndarray) -> str:
    """Return the name of a codebook of one byte whose values are computed from codes; otherwise ""."""
    return {INTEGERS.tobytes(): "integers", POWERS.tobytes(): "powers"}.get(values.tobytes(), "")


@triton.jit
def value_of(values, codes, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values of codes; two values are selected without a look-up per coordinate."""
    if K == 2:
        return tl.where(codes == 0, tl.load(values), tl.load(values + 1))
    else:
        return tl.load(values + codes)


@triton.jit
def values_of_bytes(values, words, BOOK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values of codes of one byte, four in a word, [groups, 8].

    One expression for each byte of a word assigns the coordinates to the threads that read them.
    """
    if BOOK == "integers":
        words ^= 0x80808080
    one, two = value_of_byte(values, words, 0, BOOK), value_of_byte(values, words, 1, BOOK)
    three, four = value_of_byte(values, words, 2, BOOK), value_of_byte(values, words, 3, BOOK)
    return tl.reshape(tl.join(tl.join(one, three), tl.join(two, four)), [GROUPS, 8])


@triton.jit
def value_of_byte(values, words, BYTE: tl.constexpr, BOOK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values of one byte of each word; of integers, 128 is added to the bytes."""
    if BOOK == "powers":
        exponents = words << 23 if BYTE == 0 else words << 15 if BYTE == 1 else words << 7 if BYTE == 2 else words >> 1
        return (exponents & 0x7F800000).to(tl.float32, bitcast=True)
    elif BOOK == "integers":
        bits = ((words >> (8 * BYTE)) & 255) | 0x4B000000  # 2^23 + byte
        return bits.to(tl.float32, bitcast=True) - (2.0**23 + 128)
    else:
        return tl.load(values + ((words >> (8 * BYTE)) & 255))


@triton.jit
def _add_values(  # type: ignore[no-untyped-def]
    targets, T, rows, slices, scales, row_scales, alpha, middles, M, message, row_bytes, A, R, values, signs, divisor,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, K: tl.constexpr, BOOK: tl.constexpr, ALIGNED: tl.constexpr,
    BUCKET_SIZE: tl.constexpr, HEADED: tl.constexpr, SCALED: tl.constexpr, SIGNED: tl.constexpr,
    CENTRED: tl.constexpr, DIVIDED: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(1)
    slice, t, begin = slice_of(slices, 8 if K != 3 else 1)
    row = rows + t * COLUMNS
    n = tl.load(row + N)
    j, exists = places(K)
    before = tl.load(row + BUCKET)
    bucket, _, there = buckets_at(slice, begin, j, n, tl.load(row + SIZE), group_of(K), BUCKET_SIZE)
    target = tl.load(targets + r.to(tl.int64) * T + t).to(tl.pointer_type(TYPE))
    target = tl.multiple_of(target, 16 if ALIGNED else 4) + begin + j
    if EMPTY:
        total = tl.zeros(j.shape, TYPE)
    else:
        total = read_slice(target, begin, j, n, exists, K)
    for a in range(r, A, R):
        sender = tl.cast(a, tl.int64)
        own = message + sender * row_bytes
        if K == 256:
            words = read_bytes(own + tl.load(row + CODES) + begin, left_of(begin, n))
            value = values_of_bytes(values, words, BOOK)
        else:
            value = value_of(values, unpack(own + tl.load(row + CODES), begin, n, K), K)
        if SIGNED:
            negative = unpack(own + tl.load(row + MORE), begin, n, 2)
            value = value * value_of(signs, negative, 2)
        if HEADED:
            scale = read_float(own + tl.load(row + HEADER) + 4 * bucket, there) * alpha
            value = value * of_lanes(scale, begin, j, group_of(K), BUCKET_SIZE)
        elif SCALED:
            scale = tl.load(scales + sender * row_scales + before + bucket, mask=there, other=0) * alpha
            value = value * of_lanes(scale, begin, j, group_of(K), BUCKET_SIZE)
        else:
            value = value * alpha
        if CENTRED:
            middle = tl.load(middles + sender * M + before + bucket, mask=there, other=0)
            value = of_lanes(middle, begin, j, group_of(K), BUCKET_SIZE) + value
        total += value.to(TYPE)
    if DIVIDED:
        total = tl.div_rn(total, divisor) if tl.float32 == TYPE else total / divisor
    write_slice(target, total, begin, j, n, exists, K)
