"""Stochastic rounding to the levels of a codebook; see `compressors.rounding.thresholds` for the three ways."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors.kernels.on_gpu.counter_hash import draw, lanes_on
from accordion_bench.tensors.kernels.on_gpu.launch import TYPES, launch
from accordion_bench.tensors.kernels.on_gpu.packing import pack, places, slice_size
from accordion_bench.tensors.kernels.on_gpu.table import BUCKET, CODES, SIZE, N, bucket_of, on_device, rows_on, slices_on
from accordion_bench.tensors.kernels.table import Table
from accordion_bench.tensors.upload import upload

EVEN, SYMMETRIC, ANY = (tl.constexpr(kind) for kind in range(3))
KINDS = {"even": EVEN.value, "symmetric": SYMMETRIC.value, "any": ANY.value}
COUNTED = tl.constexpr(16)  # up to so many thresholds each is compared with; beyond, a binary search is faster


def encode_levels(
    addresses: np.ndarray,
    table: Table,
    factors: Tensor,
    streams: np.ndarray,
    message: Tensor,
    like: Tensor,
    K: int,
    kind: str,
    scale: float,
    bits: int,
    starts: np.ndarray,
    widths: np.ndarray,
    central: np.ndarray,
) -> None:
    """Codes of coordinates that are normalised by a factor for each bucket, into the messages [W, B]. One launch.

    Args:
        addresses: of the coordinates, [W, T].
        table: lengths, buckets, and where the codes go.
        factors: float32 [W, M].
        streams: of random numbers, uint64 [W, T].
        message: uint8 [W, B].
        like: a tensor of the coordinates' type; they are read as float32.
        K, kind, scale, bits: see `compressors.rounding.thresholds.Rounding`.
        starts, widths: of the thresholds.
        central: start and width of the threshold that decides on the sign; empty = zero does.
    """
    there, (W, T) = message.device, addresses.shape
    where = upload(torch.from_numpy(np.stack([addresses, streams.view(np.int64)])), there)
    slices = slices_on(table, slice_size(K), there)
    central_start, central_width = (float(central[0]), float(central[1])) if len(central) else (0.0, 0.0)
    launch(
        _encode_levels,
        (len(slices), W),
        there,
        *(where[0], where[1], T, rows_on(table, there), slices, factors, table.buckets, lanes_on(there)),
        *(message, message.stride(0), on_device(starts.tobytes(), there), on_device(widths.tobytes(), there)),
        *(float(scale), central_start, central_width),
        COLUMNS=table.rows.shape[1],
        TYPE=TYPES[like.dtype],
        K=K,
        KIND=KINDS[kind],
        BITS=bits,
        COUNT=len(starts),
    )


@triton.jit
def _encode_levels(  # type: ignore[no-untyped-def]
    addresses, streams, T, rows, slices, factors, M, lanes, message, row_bytes, starts, widths,
    scale, central_start, central_width,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    w = tl.program_id(1).to(tl.int64)
    t, begin = tl.load(slices + 2 * tl.program_id(0)), tl.load(slices + 2 * tl.program_id(0) + 1)
    row = rows + t * COLUMNS
    n = tl.load(row + N)
    j, exists = places(K)
    exists = exists & (begin + j < n)
    x = tl.load(addresses + w * T + t).to(tl.pointer_type(TYPE))
    coordinates = tl.load(x + begin + j, mask=exists, other=0).to(tl.float32)
    bucket = tl.load(row + BUCKET) + bucket_of(begin, j, tl.load(row + SIZE))
    r = coordinates * tl.load(factors + w * M + bucket, mask=exists, other=0)
    v = draw(lanes, tl.load(streams + w * T + t).to(tl.uint64), begin, j, exists, BITS)
    if KIND == EVEN:
        codes = round_evenly(r, v, scale, BITS)
    elif KIND == SYMMETRIC:
        codes = round_symmetrically(r, v, starts, widths, central_start, central_width, K, COUNT)
    else:
        codes = count_below(r, v, starts, widths, COUNT)
    pack(codes, exists, begin, n, K, message + w * row_bytes + tl.load(row + CODES))


@triton.jit
def round_evenly(r, v, scale, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """floor(r + s + u), r cut to [-s, s]."""
    unit: tl.constexpr = 1.0 / (1 << BITS)
    return (tl.minimum(tl.maximum(r + scale, 0.0), scale + scale) + v * unit).to(tl.int32)


@triton.jit
def round_symmetrically(  # type: ignore[no-untyped-def]
    r, v, starts, widths, central_start, central_width, K: tl.constexpr, COUNT: tl.constexpr
):
    """The magnitude's code, and the sign's half of the codebook."""
    positive = r > central_start + v * central_width
    code = count_below(tl.abs(r), v, starts, widths, COUNT) + K // 2
    return tl.where(positive, code, K - 1 - code)


@triton.jit
def count_below(r, v, starts, widths, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many thresholds lie below each r; they ascend."""
    if COUNT > COUNTED:
        return search(r, v, starts, widths, COUNT)
    else:
        codes = (r > tl.load(starts) + v * tl.load(widths)).to(tl.int32)
        for j in range(1, COUNT):
            codes += (r > tl.load(starts + j) + v * tl.load(widths + j)).to(tl.int32)
        return codes


@triton.jit
def search(r, v, starts, widths, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The same: thresholds of the intervals below that of r lie below it, those of intervals above do not."""
    low = tl.zeros(r.shape, tl.int32)
    for k in tl.static_range(8):
        step = low + (128 >> k)
        below = tl.load(starts + step, mask=step < COUNT, other=float("inf")) < r
        low = tl.where(below, step, low)
    return low + (r > tl.load(starts + low) + v * tl.load(widths + low)).to(tl.int32)
