"""Drawn coordinates on a CPU: images of `permutations`, and gather and scatter of tensors at these coordinates.

Tensor suffixes: T tensors, W local workers, R rows of the sums.
"""

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors import permutations
from accordion_bench.tensors.kernels.compiled import array_at, compiled, i64, owner, u32, u64
from accordion_bench.tensors.kernels.dense_kernels import Coordinates, array_like
from accordion_bench.tensors.kernels.table import over_tiles
from accordion_bench.tensors.permutations import COUNT, FIRST, HIGH, LOW, ROUNDS, SIZE, TILE, Draws, N

FACTOR, OTHER = map(u32, permutations.FACTORS)
SHIFT = u32(permutations.SHIFT)


def draw(draws: Draws, words: Tensor) -> Tensor:
    """See `DenseKernels.draw`."""
    out = torch.empty(draws.room, dtype=draws.dtype)
    over_tiles(_draw, draws.tiles, draws.rows, words.numpy().view(np.uint32), out.numpy())
    return out


@compiled
def _draw(rows, words, out, first, last):  # type: ignore[no-untyped-def]
    left, right, t = np.empty(SIZE, u32), np.empty(SIZE, u32), 0
    for number in range(first, last):
        t = owner(rows, TILE, number, t)
        begin = (number - rows[t, TILE]) * SIZE
        size, low, high = min(SIZE, rows[t, COUNT] - begin), rows[t, LOW], u32(rows[t, HIGH])
        for j in range(size):
            left[j], right[j] = u32((begin + j) >> low), u32((begin + j) & ((1 << low) - 1))
        for r in range(0, rows[t, ROUNDS], 2):
            move(left[:size], right[:size], words[t, r], words[t, r + 1], high, u32(32 - low))
        own, n = out[rows[t, FIRST] + begin :][:size], rows[t, N]
        for j in range(size):
            own[j] = (i64(left[j]) << low) + i64(right[j])
        for j in range(size):
            while own[j] >= n:
                left[0], right[0] = u32(own[j] >> low), u32(own[j] & ((1 << low) - 1))
                for r in range(0, rows[t, ROUNDS], 2):
                    move(left[:1], right[:1], words[t, r], words[t, r + 1], high, u32(32 - low))
                own[j] = (i64(left[0]) << low) + i64(right[0])


@compiled
def move(left, right, word, other, high, shift):  # type: ignore[no-untyped-def]
    """Apply two rounds of the network to halves, uint32 [N]."""
    for j in range(left.size):
        moved = u32(left[j] + u32((u64(hashed(right[j], word)) * u64(high)) >> u64(32)))
        moved = min(moved, u32(moved - high))  # negative differences wrap around to large numbers
        left[j] = moved
        right[j] = u32(right[j] ^ (hashed(moved, other) >> shift))


@compiled
def hashed(x, word):  # type: ignore[no-untyped-def]
    """Hash of a half, with random leading bits; masked, because numba widens uint32 to 64 bits."""
    x = u32(u32(x ^ word) * FACTOR)
    return u32(u32(x ^ (x >> SHIFT)) * OTHER)


def gather(x: Coordinates, draws: Draws, places: Tensor) -> Tensor:
    """See `DenseKernels.gather`."""
    out = torch.empty(len(x.addresses), draws.room, dtype=x.like.dtype)
    over_tiles(_gather, draws.tiles, x.addresses, draws.rows, places.numpy(), out.numpy())
    return out


@compiled
def _gather(addresses, rows, places, out, first, last):  # type: ignore[no-untyped-def]
    t = 0
    for number in range(first, last):
        t = owner(rows, TILE, number, t)
        begin, end = bounds(rows, t, number)
        for w in range(len(addresses)):
            x, own = array_at(addresses[w, t], rows[t, N], out), out[w]
            for i in range(begin, end):
                own[i] = x[places[i]]


def scatter(
    targets: Coordinates, draws: Draws, places: Tensor, values: Coordinates, factors: tuple[float, ...]
) -> None:
    """See `DenseKernels.scatter`."""
    own = np.array(factors, array_like(targets.like).dtype)
    over_tiles(_scatter, draws.tiles, targets.addresses, draws.rows, places.numpy(), values.addresses, own)


@compiled
def _scatter(addresses, rows, places, values, factors, first, last):  # type: ignore[no-untyped-def]
    t = 0
    for number in range(first, last):
        t = owner(rows, TILE, number, t)
        begin, end = bounds(rows, t, number)
        for r in range(len(addresses)):
            x = array_at(addresses[r, t], rows[t, N], factors)
            own = array_at(values[r, t], rows[t, COUNT], factors)
            for i in range(begin, end):
                x[places[i]] += own[i - rows[t, FIRST]] * factors[t]


@compiled
def bounds(rows, t, number):  # type: ignore[no-untyped-def]
    """Range of the images of a tile in the buffer."""
    begin = rows[t, FIRST] + (number - rows[t, TILE]) * SIZE
    return begin, min(begin + SIZE, rows[t, FIRST] + rows[t, COUNT])
