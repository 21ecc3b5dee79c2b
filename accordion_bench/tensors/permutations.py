"""Keyed permutations of the numbers below n: their first k images are k distinct numbers, each made by itself.

A number x is split into x >> low, which is below `high`, and its `low` last bits, where n <= high 2^low < n + 2^low. In
each round a hash of one half moves the other one on: a Feistel network with a sum modulo `high` (Black, Rogaway 2002),
so a permutation whatever the hash. An image that is not below n is mapped again, until one is (cycle walking). All are
integers, so every engine makes the same numbers: torch here, numba and Triton in `kernels`.

Torch does not look whether a walk has ended. Less than 2^low numbers are not below n, so a walk has less than 2^low
steps among them; their images are a table, and looked up in itself it tells the end of steps twice as long: after `low`
times of all walks.

Tensor suffixes: T tensors, K images of all of them.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.counter_rng import hashed, streams_of
from accordion_bench.tensors.upload import upload

N, LOW, HIGH, ROUNDS, COUNT, FIRST, TILE = range(7)
"""Columns of `Draws.rows`: n; bits of the low half; numbers of the high half; rounds; k; where in a buffer the images
begin; tiles before the tensor's first."""

MANY, FEW, LONG = 24, 12, 1 << 16  # rounds of small n and from LONG on: with few, small sets are not equally likely
FACTORS, SHIFT = (0x85EBCA6B, 0xC2B2AE35), 15  # of the hash
SIZE = 1024  # images of a tile
ALIGNED = 32  # at a multiple of so many images those of a tensor begin; what is between is 0 or not written
WORD = (1 << 32) - 1


class Draws:
    """How many images of which permutations are made.

    Args:
        lengths: n of each tensor.
        counts: k of each tensor, at most n.

    Attributes:
        rows: int64 [T + 1, 7], the columns above; the last line tells the room and the tiles of all.
        room: images of a buffer for all.
        tiles: of all tensors.
        dtype: of images, int32 where they fit.
        spans: where in a buffer those of each tensor are.
    """

    def __init__(self, lengths: Sequence[int], counts: Sequence[int]) -> None:
        self.rows = np.zeros((len(lengths) + 1, 7), np.int64)
        n, k = np.array(lengths, np.int64), np.array(counts, np.int64)
        low = np.array([max(1, (max(size, 1) - 1).bit_length() // 2) for size in lengths], np.int64)
        high = np.maximum(1, (n + (1 << low) - 1) >> low)
        columns = {N: n, LOW: low, HIGH: high, ROUNDS: np.where(n < LONG, MANY, FEW), COUNT: k}
        for column, values in columns.items():
            self.rows[:-1, column] = values
        self.rows[1:, FIRST] = (-(-k // ALIGNED) * ALIGNED).cumsum()
        self.rows[1:, TILE] = (-(-k // SIZE)).cumsum()
        self.room, self.tiles = int(self.rows[-1, FIRST]), int(self.rows[-1, TILE])
        self.dtype = torch.int32 if max(lengths, default=0) < 1 << 31 else torch.int64
        self.spans = [(first, first + size) for first, size in self.rows[:-1, (FIRST, COUNT)].tolist()]


@functools.lru_cache(maxsize=256)
def draws_of(lengths: tuple[int, ...], counts: tuple[int, ...]) -> Draws:
    """The same object for equal arguments, since kernels keep tables for each."""
    return Draws(lengths, counts)


def words_of(keys: Sequence[int]) -> Tensor:
    """A random word for each round of the permutation of each key: the bits of uint32 as int32 [T, 24]."""
    words = hashed(streams_of(keys)[:, None] + np.arange(MANY // 2, dtype=np.uint64))
    return torch.from_numpy(words.view(np.int32))


def images(draws: Draws, words: Tensor) -> list[Tensor]:
    """The first images of each tensor's coordinates, int64 [k], on any device.

    The host reads nothing, and operations are as many for any number of tensors.

    Args:
        draws: whose.
        words: of the keys, where images are wanted; see `words_of`.
    """
    there, rows = words.device, draws.rows[:-1]
    n, low, high, rounds, counts = rows[:, : COUNT + 1].T
    beyond = (high << low) - n
    columns = np.stack([n, low, high, beyond.cumsum() - beyond - n])
    (of, i), (of_past, past) = _numbered(counts, there), _numbered(beyond, there)
    of = torch.cat([of, of_past])
    ns, lows, highs, shifts = upload(torch.from_numpy(columns), there).index_select(1, of)
    # 0 after the last round of a tensor: nothing is moved
    sizes = [np.where(r < rounds, (1 << low) if r % 2 else high, 0) for r in range(MANY)]
    pairs = torch.stack([words.T.long() & WORD, upload(torch.from_numpy(np.stack(sizes)), there)], dim=1)
    k, steps = len(i), (tuple(pair.index_select(1, of)) for pair in pairs)
    x = _mapped(torch.cat([i, past + ns[k:]]), lows, highs, steps)
    y, past = x[:k], x[k:]
    for _ in range(int(low.max())):
        past = _walked(past, past, ns[k:], shifts[k:])
    return list(_walked(y, past, ns[:k], shifts[:k]).split(counts.tolist()))


def _numbered(counts: np.ndarray, there: torch.device) -> tuple[Tensor, Tensor]:
    """Of 0, 1, ... below each count, one behind the other: whose they are, and the numbers, both int64."""
    ends = counts.cumsum()
    numbers = torch.arange(int(counts.sum()), device=there)
    both = upload(torch.from_numpy(np.stack([ends, ends - counts])), there)
    of = torch.searchsorted(both[0], numbers, right=True)
    return of, numbers - both[1].index_select(0, of)


def _mapped(x: Tensor, low: Any, high: Any, steps: Iterable[tuple[Any, ...]]) -> Tensor:
    """The network on numbers below high 2^low.

    Args:
        x: the numbers, int64.
        low, high: of the permutation; one for all numbers, or a tensor.
        steps: of each round the word and how many numbers the half has that is moved.
    """
    left, right = x >> low, x - (x >> low << low)
    for r, (word, size) in enumerate(steps):
        if r % 2:
            right = right ^ _share(left, word, size)
        else:
            left = left + _share(right, word, size)
            left = torch.where(left < high, left, left - high)
    return (left << low) + right


def _share(x: Tensor, word: Any, size: Any) -> Tensor:
    """A hashed number below `size`."""
    x = (x ^ word).mul_(FACTORS[0]).bitwise_and_(WORD)  # a product of 64 bits may overflow: its last 32 are right
    x = (x ^ (x >> SHIFT)).mul_(FACTORS[1]).bitwise_and_(WORD)
    return x.mul_(size) >> 32


def _walked(y: Tensor, past: Tensor, n: Any, shift: Any) -> Tensor:
    """Numbers y where they are below n, else where `past`, the images of the numbers from n on, has y + shift."""
    if not len(past):
        return y
    return torch.where(y < n, y, past.index_select(0, (y + shift).clamp_(0, len(past) - 1)))
