"""Keyed permutations of the integers below n, for draws of k distinct integers: the first k images.

An integer x is split into x >> low, which is below `high`, and its `low` last bits, where n <= high 2^low < n + 2^low.
Each round adds a hash of one half to the other half: a Feistel network with sums modulo `high` (Black, Rogaway 2002),
which is a permutation for any hash. An image of at least n is mapped again until it is below n (cycle walking). All
operations are on integers, so all engines draw the same: torch here, numba and Triton in `kernels`.

To avoid synchronisation, torch does not test whether a walk has ended. Fewer than 2^low integers are at least n, so a
walk has fewer than 2^low steps. The images of these integers form a table. Composing the table with itself doubles the
number of steps, so `low` compositions complete all walks.

Tensor suffixes: T tensors, K images of all of them.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.keyed_rng import hashed, streams_of
from accordion_bench.tensors.upload import upload

N, LOW, HIGH, ROUNDS, COUNT, FIRST, TILE = range(7)
"""Columns of `Draws.rows`: n; bits of the low half; size of the range of the high half; rounds; k; first image in the
buffer; tiles of previous tensors."""

MANY, FEW, LONG = 24, 12, 1 << 16  # rounds for n below LONG and from LONG on; with fewer, small sets are not uniform
FACTORS, SHIFT = (0x85EBCA6B, 0xC2B2AE35), 15  # of the hash
SIZE = 1024  # images per tile
ALIGNED = 32  # alignment of the images of a tensor in the buffer; the padding is 0 or undefined
WORD = (1 << 32) - 1


class Draws:
    """Sizes of permutations, and numbers of images.

    Args:
        lengths: n of each tensor.
        counts: k of each tensor, at most n.

    Attributes:
        rows: int64 [T + 1, 7], the columns above; the last row contains the size of the buffer and the number of tiles.
        room: size of a buffer for the images of all tensors.
        tiles: number of tiles of all tensors.
        dtype: dtype of images, int32 if they fit.
        spans: range of the images of each tensor in the buffer.
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
    """Return the same object for equal arguments, because tables of kernels are cached by object."""
    return Draws(lengths, counts)


def words_of(keys: Sequence[int]) -> Tensor:
    """Return random words for the rounds of the permutation of each key, uint32 as int32 [T, 24]."""
    words = hashed(streams_of(keys)[:, None] + np.arange(MANY // 2, dtype=np.uint64))
    return torch.from_numpy(words.view(np.int32))


def images(draws: Draws, words: Tensor) -> list[Tensor]:
    """Return the first k images of each tensor, int64 [k], on the device of `words`, see `words_of`.

    The host does not synchronise, and the number of operations does not depend on the number of tensors.
    """
    there, rows = words.device, draws.rows[:-1]
    n, low, high, rounds, counts = rows[:, : COUNT + 1].T
    beyond = (high << low) - n
    columns = np.stack([n, low, high, beyond.cumsum() - beyond - n])
    (of, i), (of_past, past) = _numbered(counts, there), _numbered(beyond, there)
    of = torch.cat([of, of_past])
    ns, lows, highs, shifts = upload(torch.from_numpy(columns), there).index_select(1, of)
    # 0 after the last round of a tensor, so that further rounds change nothing
    sizes = [np.where(r < rounds, (1 << low) if r % 2 else high, 0) for r in range(MANY)]
    pairs = torch.stack([words.T.long() & WORD, upload(torch.from_numpy(np.stack(sizes)), there)], dim=1)
    k, steps = len(i), (tuple(pair.index_select(1, of)) for pair in pairs)
    x = _mapped(torch.cat([i, past + ns[k:]]), lows, highs, steps)
    y, past = x[:k], x[k:]
    for _ in range(int(low.max())):
        past = _walked(past, past, ns[k:], shifts[k:])
    return list(_walked(y, past, ns[:k], shifts[:k]).split(counts.tolist()))


def _numbered(counts: np.ndarray, there: torch.device) -> tuple[Tensor, Tensor]:
    """Return the concatenation of 0, ..., count - 1 for each count: index of the count, and number, both int64."""
    ends = counts.cumsum()
    numbers = torch.arange(int(counts.sum()), device=there)
    both = upload(torch.from_numpy(np.stack([ends, ends - counts])), there)
    of = torch.searchsorted(both[0], numbers, right=True)
    return of, numbers - both[1].index_select(0, of)


def _mapped(x: Tensor, low: Any, high: Any, steps: Iterable[tuple[Any, ...]]) -> Tensor:
    """Apply the network to integers below high 2^low; `steps`: word, and size of the changed half, of each round."""
    left, right = x >> low, x - (x >> low << low)
    for r, (word, size) in enumerate(steps):
        if r % 2:
            right = right ^ _share(left, word, size)
        else:
            left = left + _share(right, word, size)
            left = torch.where(left < high, left, left - high)
    return (left << low) + right


def _share(x: Tensor, word: Any, size: Any) -> Tensor:
    """Return a hash below `size`."""
    x = (x ^ word).mul_(FACTORS[0]).bitwise_and_(WORD)  # the last 32 bits are right even if the product overflows
    x = (x ^ (x >> SHIFT)).mul_(FACTORS[1]).bitwise_and_(WORD)
    return x.mul_(size) >> 32


def _walked(y: Tensor, past: Tensor, n: Any, shift: Any) -> Tensor:
    """Numbers y where they are below n, else where `past`, the images of the numbers from n on, has y + shift."""
    if not len(past):
        return y
    return torch.where(y < n, y, past.index_select(0, (y + shift).clamp_(0, len(past) - 1)))
