"""Drawn coordinates on a GPU: images of `permutations`, gather and scatter; one tile of a tensor per program.

Tensor suffixes: T tensors, W local workers, R rows of the sums.
"""

import functools

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors import permutations, upload
from accordion_bench.tensors.kernels.dense_kernels import Coordinates
from accordion_bench.tensors.kernels.on_gpu.launch import KEPT, TYPES, launch, parts_of, rows_on
from accordion_bench.tensors.permutations import Draws

N, LOW, HIGH, ROUNDS, COUNT, FIRST, TILE = (tl.constexpr(column) for column in range(7))  # see `permutations`
COLUMNS, WORDS = tl.constexpr(7), tl.constexpr(permutations.MANY)
SIZE, ALIGNED = tl.constexpr(permutations.SIZE), tl.constexpr(permutations.ALIGNED)
FACTOR, OTHER = (tl.constexpr(factor) for factor in permutations.FACTORS)
SHIFT = tl.constexpr(permutations.SHIFT)


@functools.lru_cache(maxsize=KEPT)
def tiles_on(draws: Draws, device: torch.device) -> Tensor:
    """Return the tensor and the first image of each tile, int32 [tiles, 2]; cached."""
    parts = parts_of(np.diff(draws.rows[:, TILE.value]), permutations.SIZE)
    return upload.table(torch.from_numpy(parts), device)


@functools.lru_cache(maxsize=KEPT)
def factors_on(factors: tuple[float, ...], device: torch.device) -> Tensor:
    """Return the factors of tensors on a device, float64 [T]; cached."""
    return upload.table(torch.tensor(factors, dtype=torch.float64), device)


def draw(draws: Draws, words: Tensor) -> Tensor:
    """See `DenseKernels.draw`. One launch."""
    there = words.device
    out = torch.empty(draws.room, dtype=draws.dtype, device=there)
    kind = tl.int32 if draws.dtype == torch.int32 else tl.int64
    launch(_draw, (draws.tiles,), there, rows_on(draws, there), tiles_on(draws, there), words, out, TYPE=kind)
    return out


def gather(x: Coordinates, draws: Draws, places: Tensor) -> Tensor:
    """See `DenseKernels.gather`. One launch."""
    there, (W, T) = places.device, x.addresses.shape
    out = torch.empty(W, draws.room, dtype=x.like.dtype, device=there)
    launch(
        _gather,
        (draws.tiles, W),
        there,
        *(x.on_device, T, rows_on(draws, there), tiles_on(draws, there)),
        *(places, out, draws.room),
        TYPE=TYPES[x.like.dtype],
    )
    return out


def scatter(
    targets: Coordinates, draws: Draws, places: Tensor, values: Coordinates, factors: tuple[float, ...]
) -> None:
    """See `DenseKernels.scatter`. One launch."""
    there, (R, T) = places.device, targets.addresses.shape
    both = upload.upload(torch.from_numpy(np.stack([targets.addresses, values.addresses])), there)
    launch(
        _scatter,
        (draws.tiles, R),
        there,
        *(both[0], both[1], T, rows_on(draws, there), tiles_on(draws, there), places, factors_on(factors, there)),
        TYPE=TYPES[targets.like.dtype],
    )


@triton.jit
def _draw(rows, tiles, words, out, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    t, i, at, exists, room = _tile(rows, tiles, TYPE)
    row, own = rows + t * COLUMNS, words + t * WORDS
    n, low, high = tl.load(row + N).to(TYPE), tl.load(row + LOW).to(TYPE), tl.load(row + HIGH).to(tl.uint32)
    rounds, shift, mask = tl.load(row + ROUNDS).to(tl.int32), (32 - low).to(tl.uint32), (1 << low.to(tl.uint32)) - 1
    x, outside = i, exists
    while tl.max(outside.to(tl.int32), axis=0) > 0:
        left, right = (x >> low).to(tl.uint32), x.to(tl.uint32) & mask
        for r in range(0, rounds, 2):
            left += tl.umulhi(_hashed(right, own + r), high)
            left = tl.minimum(left, left - high)  # negative differences wrap around to large numbers
            right ^= _hashed(left, own + r + 1) >> shift
        x = tl.where(outside, (left.to(TYPE) << low) + right.to(TYPE), x)
        outside = outside & (x >= n)
    tl.store(out + at, tl.where(exists, x, 0), mask=room)


@triton.jit
def _hashed(x, word):  # type: ignore[no-untyped-def]
    """Hash of a half, with random leading bits."""
    x = (x ^ tl.load(word).to(tl.uint32, bitcast=True)) * FACTOR
    return (x ^ (x >> SHIFT)) * OTHER


@triton.jit
def _gather(addresses, T, rows, tiles, places, out, room, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    w = tl.program_id(1).to(tl.int64)
    t, _, at, _, there = _tile(rows, tiles, tl.int64)
    x = tl.load(addresses + w * T + t).to(tl.pointer_type(TYPE))
    own = tl.load(x + tl.load(places + at, mask=there, other=0), mask=there, other=0)
    tl.store(out + w * room + at, own, mask=there)


@triton.jit
def _scatter(addresses, values, T, rows, tiles, places, factors, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    r = tl.program_id(1).to(tl.int64)
    t, i, at, exists, there = _tile(rows, tiles, tl.int64)
    own = tl.load(tl.load(values + r * T + t).to(tl.pointer_type(TYPE)) + i, mask=exists, other=0)
    x = tl.load(addresses + r * T + t).to(tl.pointer_type(TYPE)) + tl.load(places + at, mask=there, other=0)
    total = tl.load(x, mask=exists, other=0) + own * tl.load(factors + t).to(TYPE)
    tl.store(x, total, mask=exists)


@triton.jit
def _tile(rows, tiles, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tensor of a program; numbers of its images, positions in the buffer; which exist, and which are in the buffer.

    The images of a tensor are padded to a multiple of ALIGNED, so that loads have 16 bytes.
    """
    t, begin = tl.load(tiles + 2 * tl.program_id(0)), tl.load(tiles + 2 * tl.program_id(0) + 1)
    row, begin = rows + t * COLUMNS, tl.multiple_of(begin, SIZE)
    i, k = begin.to(TYPE) + tl.arange(0, SIZE), tl.load(row + COUNT).to(TYPE)
    room = i < tl.multiple_of((k + ALIGNED - 1) // ALIGNED * ALIGNED, ALIGNED)
    return t, i, tl.multiple_of(tl.load(row + FIRST), ALIGNED) + begin + tl.arange(0, SIZE), i < k, room
