"""Encoding of coordinates as packed codes on a GPU; one slice of a tensor per program."""

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors.kernels import dense_kernels as kinds
from accordion_bench.tensors.kernels.dense_kernels import Coordinates, Encoding
from accordion_bench.tensors.kernels.on_gpu.counter_hash import draw
from accordion_bench.tensors.kernels.on_gpu.launch import (
    BUCKET,
    CODES,
    DIFFERENT,
    HEADER,
    MORE,
    SIZE,
    TYPES,
    N,
    buckets_at,
    launch,
    of_lanes,
    on_device,
    rows_on,
    slice_of,
    slices_on,
    stride,
)
from accordion_bench.tensors.kernels.on_gpu.norms import above, constants_of, factor_of, scale_of
from accordion_bench.tensors.kernels.on_gpu.packing import (
    GROUPS,
    group_of,
    left_of,
    pack,
    places,
    read_slice,
    slice_size,
    write_slice,
)
from accordion_bench.tensors.kernels.on_gpu.residual_inputs import NOT, rate_of, row_at, told, with_residuals
from accordion_bench.tensors.kernels.on_gpu.sums import books_on, value_of, write_float, write_headers
from accordion_bench.tensors.kernels.table import Table, bucket_size
from accordion_bench.tensors.keyed_rng import lanes_on

COUNTED = tl.constexpr(16)  # with more thresholds, a binary search is faster than comparisons one by one


@triton.jit
def round_evenly(r, v, scale, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """floor(r + s + u), with r clamped to [-s, s]."""
    unit: tl.constexpr = 1.0 / (1 << BITS)
    return (tl.minimum(tl.maximum(r + scale, 0.0), scale + scale) + v * unit).to(tl.int32)


@triton.jit
def round_symmetrically(  # type: ignore[no-untyped-def]
    r, v, starts, widths, central_start, central_width, K: tl.constexpr, COUNT: tl.constexpr
):
    """Code of the magnitude, in the half of the codebook of the sign."""
    positive = r > central_start + v * central_width
    code = count_below(tl.abs(r), v, starts, widths, COUNT) + K // 2
    return tl.where(positive, code, K - 1 - code)


@triton.jit
def count_below(r, v, starts, widths, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of ascending thresholds below each r."""
    if COUNT > COUNTED:
        return search(r, v, starts, widths, COUNT)
    else:
        codes = (r > tl.load(starts) + v * tl.load(widths)).to(tl.int32)
        for j in range(1, COUNT):
            codes += (r > tl.load(starts + j) + v * tl.load(widths + j)).to(tl.int32)
        return codes


@triton.jit
def search(r, v, starts, widths, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of thresholds below each r, by a binary search for its interval and one comparison within."""
    low = tl.zeros(r.shape, tl.int32)
    for k in tl.static_range(8):
        step = low + (128 >> k)
        below = tl.load(starts + step, mask=step < COUNT, other=float("inf")) < r
        low = tl.where(below, step, low)
    return low + (r > tl.load(starts + low) + v * tl.load(widths + low)).to(tl.int32)


MANTISSA = tl.constexpr(23)


@triton.jit
def round_to_powers(x, v, K: tl.constexpr):  # type: ignore[no-untyped-def]
    """Code of the exponent: that of float32 (K = 256); or 1 to 127 for 2^-63 to 2^63, 0 for zero (K = 128).

    v are random integers below 2^23.
    """
    smallest: tl.constexpr = 2.0**-63
    steps: tl.constexpr = 2.0**86
    magnitude = tl.abs(x)
    exponent = (magnitude.to(tl.int32, bitcast=True) + v.to(tl.int32)) >> MANTISSA
    if K == 256:
        return tl.minimum(exponent, 254)
    else:  # magnitudes below 2^-63 become 2^-63 or 0
        up = (v < magnitude * steps).to(tl.int32)
        return tl.where(magnitude < smallest, up, tl.minimum(exponent - 63, 127))


ROUNDER = tl.constexpr(1.5 * 2.0**23)  # adding it rounds to integers, ties to even


@triton.jit
def round_to_nearest(steps):  # type: ignore[no-untyped-def]
    """int8; ties to even."""
    return ((steps + ROUNDER) - ROUNDER).to(tl.int32) & 255


@triton.jit
def round_at_random(steps, v, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """int8, floor(step + u); u = v 2^-BITS."""
    unit: tl.constexpr = 1.0 / (1 << BITS)
    up = tl.minimum(tl.maximum(steps + v * unit, -127.0), 127.0)
    whole = up.to(tl.int32)
    # not tl.floor, which returns 0 for the smallest negative numbers
    return (whole - (up < whole.to(tl.float32)).to(tl.int32)) & 255


@triton.jit
def round_to_e4m3(steps):  # type: ignore[no-untyped-def]
    """4 bits of exponent, 3 of mantissa; ties to even; for magnitudes up to 448."""
    return narrowed(steps.to(tl.int32, bitcast=True), 20, 7, 7)


@triton.jit
def round_to_e5m2(steps):  # type: ignore[no-untyped-def]
    """5 bits of exponent, 2 of mantissa; ties to even; for magnitudes up to 57,344."""
    return narrowed(steps.to(tl.int32, bitcast=True), 21, 15, 7)


@triton.jit
def round_to_e3m0(steps):  # type: ignore[no-untyped-def]
    """3 bits of exponent, none of mantissa; ties to the even code; for magnitudes up to 1."""
    return narrowed(steps.to(tl.int32, bitcast=True), 23, 7, 3)


@triton.jit
def narrowed(bits, DROPPED: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Bits of a float32 rounded by DROPPED bits of the mantissa, with exponent bias BIAS and the sign on top."""
    magnitude = bits & 0x7FFFFFFF
    # subnormal results: adding a power of two rounds to whole steps in the last bits
    power = tl.full(bits.shape, (128 - BIAS + DROPPED) << 23, tl.int32)
    added = magnitude.to(tl.float32, bitcast=True) + power.to(tl.float32, bitcast=True)
    small = added.to(tl.int32, bitcast=True) - power
    odd = (magnitude >> DROPPED) & 1
    large = (magnitude + odd + ((1 << (DROPPED - 1)) - 1 - ((127 - BIAS) << 23))) >> DROPPED
    code = tl.where(magnitude < (128 - BIAS) << 23, small, large)
    return (code & ((1 << WIDTH) - 1)) | ((bits >> (31 - WIDTH)) & (1 << WIDTH))


EVEN, SYMMETRIC, ANY = tl.constexpr(kinds.EVEN), tl.constexpr(kinds.SYMMETRIC), tl.constexpr(kinds.ANY)
INTEGER, RANDOM_INTEGER = tl.constexpr(kinds.INTEGER), tl.constexpr(kinds.RANDOM_INTEGER)
E4M3, E5M2, E3M0 = tl.constexpr(kinds.E4M3), tl.constexpr(kinds.E5M2), tl.constexpr(kinds.E3M0)
POWERS, SIGNS = tl.constexpr(kinds.POWERS), tl.constexpr(kinds.SIGNS)


def encode(x: Coordinates, table: Table, message: Tensor, encoding: Encoding) -> None:
    """See `DenseKernels.encode`. One launch; one more to write scales if block sizes differ.

    Whether all is finite, the exchange looks itself, once per step.
    """
    rounding, scales, factors, streams, measured, values, middles = encoding
    there, (W, T) = message.device, x.addresses.shape
    size, headed = bucket_size(table), scales is not None
    if scales is not None and size == DIFFERENT.value:
        write_headers(scales, table, message)
        headed = False
    slices, (given, constants) = slices_on(table, slice_size(rounding.K), there), told(x)
    addresses, *numbers = given
    central = rounding.central if rounding.central.size else np.zeros(2, np.float32)
    books = books_on(values, there) if values else (lanes_on(there),) * 2
    launch(
        _encode,
        (len(slices), W),
        there,
        *(addresses, *numbers, streams if streams.numel() else addresses, T, rows_on(table, there), slices),
        *(factors if scales is None else scales, table.buckets, factors, stride(factors), lanes_on(there)),
        *(message, message.stride(0), on_device(rounding.starts.tobytes(), there)),
        *(on_device(rounding.widths.tobytes(), there), float(rounding.scale), above(rounding.scale)),
        *(float(central[0]), float(central[1]), *books, factors if middles is None else middles),
        COLUMNS=table.rows.shape[1],
        TYPE=TYPES[x.like.dtype],
        **constants,
        BUCKET_SIZE=size,
        HEADED=headed,
        SCALED=factors.numel() > 0,
        KNOWN=scales is not None,
        SIGNED=len(values) > 1,
        CENTRED=middles is not None,
        NORM=measured.norms[0] if measured else "",
        **{name: value for name, value in constants_of(measured).items() if name in ("OVER", "MOST", "FACTOR")},
        KIND=rounding.kind,
        K=rounding.K,
        BITS=rounding.bits,
        COUNT=len(rounding.starts),
    )


@triton.jit
def norms_of(x, NORM: tl.constexpr, BUCKET: tl.constexpr):  # type: ignore[no-untyped-def]
    """Norms of the buckets of a slice [groups, 8], float64; largest magnitudes are float32."""
    if NORM == "linf":
        # by the bits of float32: their order is that of magnitudes, with NaN above infinity
        most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
        most = tl.max(tl.reshape(most, [GROUPS * 8 // BUCKET, BUCKET // 8]), axis=1)
        return most.to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float64)
        squares = tl.sum(wide * wide, axis=1)
        return tl.sqrt(tl.sum(tl.reshape(squares, [GROUPS * 8 // BUCKET, BUCKET // 8]), axis=1))


@triton.jit
def to_groups(of_bucket, BUCKET: tl.constexpr):  # type: ignore[no-untyped-def]
    """Broadcast a number per bucket of a slice to its groups, [groups, 1]."""
    wide = tl.broadcast_to(of_bucket[:, None], [GROUPS * 8 // BUCKET, BUCKET // 8])
    return tl.reshape(wide, [GROUPS, 1])


@triton.jit
def _encode(  # type: ignore[no-untyped-def]
    addresses, weight, decay, momentum, streams, T, rows, slices, scales, M, factors, row_factors, lanes,
    message, row_bytes, starts, widths, scale, next_above, central_start, central_width, values, signs, middles,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr, FED: tl.constexpr, DECAYED: tl.constexpr,
    MASKED: tl.constexpr, LED: tl.constexpr, BUCKET_SIZE: tl.constexpr, HEADED: tl.constexpr, SCALED: tl.constexpr,
    KNOWN: tl.constexpr, SIGNED: tl.constexpr, CENTRED: tl.constexpr, NORM: tl.constexpr, OVER: tl.constexpr,
    MOST: tl.constexpr, FACTOR: tl.constexpr, KIND: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    w, W = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    slice, t, begin = slice_of(slices, 8 if K != 3 else 1)
    row, out = rows + t * COLUMNS, message + w * row_bytes
    n = tl.load(row + N)
    j, exists = places(K)
    x = row_at(addresses, w, T, t, TYPE, ALIGNED) + begin + j
    whole = read_slice(x, begin, j, n, exists, K)
    if FED != NOT:
        e = row_at(addresses, W + w, T, t, TYPE, ALIGNED) + begin + j
        rate = rate_of(addresses, W, T, t, TYPE, FED)
        kept = read_slice(e, begin, j, n, exists, K)
        u = kept
        if LED:
            u = read_slice(row_at(addresses, 2 * W + 2, T, t, TYPE, ALIGNED) + begin + j, begin, j, n, exists, K)
        whole = with_residuals(whole, kept, u, weight, decay, momentum, rate, FED, DECAYED, LED)
    r = whole.to(tl.float32)
    exists = exists & (j < left_of(begin, n))
    negative = (r < 0).to(tl.int32)
    before = tl.load(row + BUCKET)
    bucket, first, there = buckets_at(slice, begin, j, n, tl.load(row + SIZE), group_of(K), BUCKET_SIZE)
    if HEADED:
        own = tl.load(scales + w * M + before + bucket, mask=first & there, other=0)
        write_float(out + tl.load(row + HEADER) + 4 * bucket, own, first & there)
    if NORM != "":
        own = scale_of(norms_of(r, NORM, BUCKET_SIZE), 1, OVER, MOST)
        of_bucket = factor_of(own, scale, next_above, FACTOR)
        here = begin // BUCKET_SIZE + tl.arange(0, GROUPS * 8 // BUCKET_SIZE)
        write_float(out + tl.load(row + HEADER) + 4 * here, own, here * BUCKET_SIZE < n)
        r = r * to_groups(of_bucket, BUCKET_SIZE)
    if SCALED:
        factor = tl.load(factors + w * row_factors + before + bucket, mask=there, other=0)
        r = r * of_lanes(factor, begin, j, group_of(K), BUCKET_SIZE)
    if BITS > 0:
        v = draw(lanes, tl.load(streams + w * T + t).to(tl.uint64), begin, j, exists, BITS, K != 3)
    if KIND == EVEN:
        codes = round_evenly(r, v, scale, BITS)
    elif KIND == SYMMETRIC:
        codes = round_symmetrically(r, v, starts, widths, central_start, central_width, K, COUNT)
    elif KIND == ANY:
        codes = count_below(r, v, starts, widths, COUNT)
    elif KIND == INTEGER:
        codes = round_to_nearest(r)
    elif KIND == RANDOM_INTEGER:
        codes = round_at_random(r, v, BITS)
    elif KIND == E4M3:
        codes = round_to_e4m3(r)
    elif KIND == E5M2:
        codes = round_to_e5m2(r)
    elif KIND == E3M0:
        codes = round_to_e3m0(r)
    elif KIND == POWERS:
        codes = round_to_powers(r, v, K)
        pack(negative, begin, n, 2, out + tl.load(row + MORE))
    else:
        tl.static_assert(KIND == SIGNS)
        codes = negative
    if K != 256 and KIND != SIGNS:  # signs of what does not exist are those of zeros
        codes = tl.where(exists, codes, 0)
    pack(codes, begin, n, K, out + tl.load(row + CODES))
    if FED != NOT:
        value = value_of(values, codes.to(tl.int32) & 255, K)  # the code of NaN is arbitrary
        if SIGNED:
            value = value * value_of(signs, negative, 2)
        if NORM != "":
            value = value * -to_groups(own, BUCKET_SIZE)
        elif KNOWN:
            own = tl.load(scales + w * M + before + bucket, mask=there, other=0)
            value = value * -of_lanes(own, begin, j, group_of(K), BUCKET_SIZE)
        else:
            value = -value
        if CENTRED:
            middle = tl.load(middles + w * M + before + bucket, mask=there, other=0)
            value = value - of_lanes(middle, begin, j, group_of(K), BUCKET_SIZE)
        whole = whole + value.to(TYPE)
        if MASKED:
            mask = tl.load(addresses + (2 * W + 1) * T + t)
            if mask != 0:
                alive = tl.multiple_of(mask.to(tl.pointer_type(TYPE)), 16 if ALIGNED else 4) + begin + j
                whole = whole * read_slice(alive, begin, j, n, exists, K)
        write_slice(e, whole, begin, j, n, exists, K)
