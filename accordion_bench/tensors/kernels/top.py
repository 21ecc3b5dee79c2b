"""Selection of the largest magnitudes of rows on a CPU, stored as the smallest selected key.

The key of a number is its magnitude's bits as an integer. NaN has the key of infinity, the largest one. The selection
of a row is all keys above `least`, and the first ones of those equal to it; no indices are stored.

1. A sample of the row gives two bounds that enclose the k-th largest key.
2. One pass counts the keys of each tile from the upper bound on, and stores those between the bounds.
3. Among the stored keys the k-th largest is found exactly.

A row is one worker's part of one tensor.

Tensor suffixes: T tensors, W workers, R rows.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.kernels.compiled import array_at, compiled, i64, ones, u64, zeros_below
from accordion_bench.tensors.kernels.table import addresses, over_tiles

ADDRESS, N, TILE = range(3)  # columns of `Rows.table`
SIZE = 1 << 16  # coordinates of a tile; fits into a second-level cache
SAMPLE, MOST = 1 << 10, 1 << 12  # fewest and most keys of a sample, which has n / 128 keys of a row of n
ROOM = SIZE // 4  # stored keys of a tile for the exact search; enough for the smallest sample in the worst case
DIGITS = 8  # bits per pass of a radix search
MAGNITUDE, INFINITE = range(2)  # entries of `limits`
UPPER, LOWER = range(2)  # columns of bounds
LARGE, BETWEEN = range(2)  # columns of the counts of a tile: keys from the upper bound on, keys between the bounds
GREATER, EQUAL = range(2)  # columns of `ChosenKeys.counts`


class Rows:
    """Addresses of rows, partitioned into tiles.

    Args:
        rows_W: tensors [W, N] of one dtype with contiguous rows. References are kept, since they may be copies.

    Attributes:
        table: int64 [R + 1, 3], the columns above: address, number of coordinates, number of tiles of previous rows.
            Row w T + t is worker w's part of tensor t; the last row contains the total number of tiles.
        workers, count: numbers of workers and of rows, W and R.
        tiles: number of tiles of all rows.
        dtype: NumPy dtype of coordinates.
    """

    def __init__(self, rows_W: Sequence[Tensor]) -> None:
        self.workers, self._kept = len(rows_W[0]), rows_W
        self.count = self.workers * len(rows_W)
        self.table = np.zeros((self.count + 1, 3), np.int64)
        self.table[:-1, ADDRESS] = addresses(rows_W).ravel()
        self.table[:-1, N] = np.tile(np.array([x_W.shape[1] for x_W in rows_W], np.int64), self.workers)
        self.table[1:, TILE] = (-(-self.table[:-1, N] // SIZE)).cumsum()
        self.tiles = int(self.table[-1, TILE])
        self.dtype = np.float32 if rows_W[0].dtype == torch.float32 else np.float64


@functools.cache
def limits(dtype: Any) -> np.ndarray:
    """Return the mask of a magnitude's bits and the key of infinity, as integers of the width of a dtype."""
    integer = np.dtype(f"i{np.dtype(dtype).itemsize}")
    return np.array([np.iinfo(integer).max, key(np.inf, dtype)], integer)


def key(value: float, dtype: Any) -> int:
    """Return the key of a non-negative number."""
    number = np.array(value, dtype)
    return int(number.view(f"i{number.itemsize}"))


class ChosenKeys:
    """Selection of coordinates of rows, see `codecs.selection.Selection`.

    Attributes:
        rows: coordinates.
        least: smallest selected key of each row, int64 [R].
        kept: number of selected coordinates, int64 [R].
        counts: numbers of keys above `least` and equal to it in each tile, int64 [tiles, 2].
    """

    def __init__(self, rows: Rows) -> None:
        self.rows, self.counts = rows, np.zeros((rows.tiles, 2), np.int64)
        self.least, self.kept = np.zeros((2, rows.count), np.int64)

    @property
    def counts_W(self) -> Tensor:
        """Number of selected coordinates, int32 [W, T]."""
        return torch.from_numpy(self.kept.astype(np.int32)).view(self.rows.workers, -1)


def choose_largest(rows: Rows, k: Sequence[int] | np.ndarray, chosen: ChosenKeys | None = None) -> ChosenKeys:
    """Select the k [R] largest magnitudes of every row; ties go to the lower index.

    Args:
        rows: coordinates.
        k: number for each row, at most its coordinates; -1 = leave the row of `chosen` unchanged.
        chosen: selection to overwrite and return; None = a new one.
    """
    chosen = chosen or ChosenKeys(rows)
    wanted, like = np.asarray(k, np.int64), limits(rows.dtype)
    bounds = np.zeros((rows.count, 2), np.int64)
    found = np.zeros((rows.tiles, 2), np.int64)
    inside = torch.empty(rows.tiles, ROOM * like.itemsize, dtype=torch.uint8).numpy().view(like.dtype)
    over_tiles(_bound, rows.count, rows.table, like, wanted, bounds)
    over_tiles(_compare, rows.tiles, rows.table, like, wanted, bounds, found, inside)
    over_tiles(_decide, rows.count, rows.table, like, wanted, bounds, found, inside, chosen.least, chosen.counts)
    chosen.kept[wanted >= 0] = wanted[wanted >= 0]
    return chosen


def choose_by_key(chosen: ChosenKeys, least: np.ndarray) -> None:
    """Select all magnitudes with keys of at least `least` [R]; -1 = leave the row unchanged."""
    rows = chosen.rows
    chosen.least[least >= 0] = least[least >= 0]
    over_tiles(_count, rows.tiles, rows.table, limits(rows.dtype), least, chosen.counts)
    until = np.concatenate([[0], chosen.counts[:, GREATER].cumsum()])
    found = until[rows.table[1:, TILE]] - until[rows.table[:-1, TILE]]
    chosen.kept[least >= 0] = found[least >= 0]


def sampled_keys(rows: Rows, rank: np.ndarray, offset: np.ndarray, stride: np.ndarray) -> np.ndarray:
    """Return the rank-th largest key [R] of the sample at offset + i stride of each row; 0 for rank 0."""
    out = np.zeros(rows.count, np.int64)
    over_tiles(_sample, rows.count, rows.table, limits(rows.dtype), rank, offset, stride, out)
    return out


@compiled
def list_ones(word, start, out, found):  # type: ignore[no-untyped-def]
    """Write the positions of the ones of a word, plus `start`, to out[found:], which has seven spare elements."""
    end = found + i64(ones(word))
    while found < end:
        for i in range(8):  # a branch per one would be mispredicted often
            out[found + i] = start + i64(zeros_below(word))
            word &= word - u64(1)
        found += 8
    return end


@compiled
def at_least(block, magnitude, least):  # type: ignore[no-untyped-def]
    """Return a uint64 with a one for each key of a block of 64 that is at least `least`."""
    word = u64(0)
    for i in range(64):
        word |= u64((block[i] & magnitude) >= least) << u64(i)
    return word


@compiled
def collect(x, magnitude, least, out):  # type: ignore[no-untyped-def]
    """Write the ascending positions of keys of at least `least` to out; return their number."""
    found = 0
    whole = x.size // 64 * 64
    for start in range(0, whole, 64):
        found = list_ones(at_least(x[start : start + 64], magnitude, least), start, out, found)
    for i in range(whole, x.size):
        out[found] = i
        found += (x[i] & magnitude) >= least
    return found


@compiled
def kth_largest(keys, k):  # type: ignore[no-untyped-def]
    """Return the k-th largest key, 0 < k <= number of keys; overwrites the keys."""
    counts = np.empty(1 << DIGITS, np.int64)
    while True:
        smallest, largest = keys[0], keys[0]
        for x in keys:
            smallest, largest = min(smallest, x), max(largest, x)
        shift = 0
        while (i64(largest) - i64(smallest)) >> shift >= 1 << DIGITS:
            shift += 1
        if smallest == largest:
            return i64(smallest)
        for digit in range(counts.size):
            counts[digit] = 0
        for x in keys:
            counts[(i64(x) - i64(smallest)) >> shift] += 1
        digit = counts.size - 1
        while counts[digit] < k:
            k -= counts[digit]
            digit -= 1
        left = 0
        for x in keys:
            keys[left] = x
            left += (i64(x) - i64(smallest)) >> shift == digit
        keys = keys[:left]


@compiled
def _bound(rows, limits, wanted, bounds, first, last):  # type: ignore[no-untyped-def]
    """Compute an upper and a lower bound of the k-th largest key of each row; equal to the key for short rows."""
    for row in range(first, last):
        n, k = rows[row, N], wanted[row]
        if k == 0:
            bounds[row, UPPER] = bounds[row, LOWER] = i64(limits[MAGNITUDE])
        if k <= 0 or k == n:
            continue  # all coordinates are selected, so the smallest key is 0
        x = array_at(rows[row, ADDRESS], n, limits)
        stride = max(1, n // min(MOST, max(SAMPLE, n // 128)))
        while math.gcd(stride, n) > 1:  # otherwise the sample contains only some rows or filter taps of a tensor
            stride -= 1
        sample = np.empty((n + stride - 1) // stride, limits.dtype)
        rank = k * sample.size / n
        # more than four standard deviations on both sides, so that a second pass is rarely necessary
        margin = 4 * math.sqrt(rank) + 4 if stride > 1 else 0.0
        upper, lower = int(rank - margin), int(rank + margin)
        bounds[row, UPPER] = i64(limits[INFINITE])
        if upper >= 1:
            _take(x, 0, stride, limits, sample)
            bounds[row, UPPER] = kth_largest(sample, upper)
        if upper == lower:
            bounds[row, LOWER] = bounds[row, UPPER]
        elif lower <= sample.size:  # else 0
            _take(x, 0, stride, limits, sample)
            bounds[row, LOWER] = kth_largest(sample, lower)


@compiled
def _take(x, offset, stride, limits, out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = min(x[offset + i * stride] & limits[MAGNITUDE], limits[INFINITE])


@compiled
def _compare(rows, limits, wanted, bounds, found, inside, first, last):  # type: ignore[no-untyped-def]
    """Count the keys of each tile from the upper bound of its row on, and store those between the bounds."""
    places = np.empty(SIZE + 8, np.int32)
    for row in range(rows.shape[0] - 1):
        upper, lower = bounds[row, UPPER], bounds[row, LOWER] + 1
        coordinates = array_at(rows[row, ADDRESS], rows[row, N], limits)
        for tile in range(max(first, rows[row, TILE]), min(last, rows[row + 1, TILE])):
            if wanted[row] < 0:
                continue
            start = (tile - rows[row, TILE]) * SIZE
            x = coordinates[start : start + SIZE]
            large, between = 0, 0
            whole = x.size // 64 * 64
            for at in range(0, whole, 64):
                block = x[at : at + 64]
                large_ones = at_least(block, limits[MAGNITUDE], upper)
                large += i64(ones(large_ones))
                between = list_ones(at_least(block, limits[MAGNITUDE], lower) & ~large_ones, at, places, between)
            for i in range(whole, x.size):
                key = i64(x[i] & limits[MAGNITUDE])
                large += key >= upper
                places[between] = i
                between += lower <= key < upper
            found[tile, LARGE], found[tile, BETWEEN] = large, between
            if between <= ROOM:
                _keep(x, places[:between], limits, inside[tile])


@compiled
def _keep(x, places, limits, out):  # type: ignore[no-untyped-def]
    for i in range(places.size):
        out[i] = min(x[places[i]] & limits[MAGNITUDE], limits[INFINITE])


@compiled
def _decide(rows, limits, wanted, bounds, found, inside, least, counts, first, last):  # type: ignore[no-untyped-def]
    """Find the k-th largest key of each row; count the keys of each tile above it and equal to it."""
    for row in range(first, last):
        k, begin, end = wanted[row], rows[row, TILE], rows[row + 1, TILE]
        if k < 0:
            continue
        large, between, fits = 0, 0, True
        for tile in range(begin, end):
            large += found[tile, LARGE]
            between += found[tile, BETWEEN]
            fits &= found[tile, BETWEEN] <= ROOM
        if large == k:
            least[row] = bounds[row, UPPER]
            for tile in range(begin, end):
                counts[tile, GREATER], counts[tile, EQUAL] = found[tile, LARGE], 0
        elif large < k <= large + between and fits:
            keys = np.empty(between, limits.dtype)
            at = 0
            for tile in range(begin, end):
                for i in range(found[tile, BETWEEN]):
                    keys[at + i] = inside[tile, i]
                at += found[tile, BETWEEN]
            least[row] = kth_largest(keys, k - large)
            for tile in range(begin, end):
                greater, equal = found[tile, LARGE], 0
                for i in range(found[tile, BETWEEN]):
                    greater += inside[tile, i] > least[row]
                    equal += inside[tile, i] == least[row]
                counts[tile, GREATER], counts[tile, EQUAL] = greater, equal
        else:  # many keys equal a bound, or the bounds do not enclose the key
            x = array_at(rows[row, ADDRESS], rows[row, N], limits)
            least[row] = bounds[row, UPPER if large > k else LOWER]
            greater, equal = _weigh(x, least[row], limits, counts[begin:end])
            if not greater < k <= greater + equal:
                least[row] = _kth_of_row(x, k, limits)
                _weigh(x, least[row], limits, counts[begin:end])


@compiled
def _weigh(x, least, limits, counts):  # type: ignore[no-untyped-def]
    """Count the keys of each tile of a row above `least` and equal to it; return both sums."""
    total_greater, total_equal = 0, 0
    for tile in range(counts.shape[0]):
        greater, equal = 0, 0
        for y in x[tile * SIZE : (tile + 1) * SIZE]:
            key = i64(min(y & limits[MAGNITUDE], limits[INFINITE]))
            greater += key > least
            equal += key == least
        counts[tile, GREATER], counts[tile, EQUAL] = greater, equal
        total_greater, total_equal = total_greater + greater, total_equal + equal
    return total_greater, total_equal


@compiled
def _kth_of_row(x, k, limits):  # type: ignore[no-untyped-def]
    """Return the k-th largest key of a row by a radix search, if the bounds do not enclose it; stores no keys."""
    counts = np.empty(1 << DIGITS, np.int64)
    least, shift = 0, 8 * limits.itemsize
    while shift:
        shift -= DIGITS
        for digit in range(counts.size):
            counts[digit] = 0
        for y in x:
            key = i64(min(y & limits[MAGNITUDE], limits[INFINITE])) - least
            if key >= 0 and key >> shift < counts.size:
                counts[key >> shift] += 1
        digit = counts.size - 1
        while counts[digit] < k:
            k -= counts[digit]
            digit -= 1
        least += digit << shift
    return least


@compiled
def _count(rows, limits, least, counts, first, last):  # type: ignore[no-untyped-def]
    """Count the keys of each tile of at least the row's `least`; all count as greater."""
    for row in range(rows.shape[0] - 1):
        coordinates = array_at(rows[row, ADDRESS], rows[row, N], limits)
        for tile in range(max(first, rows[row, TILE]), min(last, rows[row + 1, TILE])):
            if least[row] < 0:
                continue
            start = (tile - rows[row, TILE]) * SIZE
            greater = 0
            for y in coordinates[start : start + SIZE]:
                greater += (y & limits[MAGNITUDE]) >= least[row]
            counts[tile, GREATER], counts[tile, EQUAL] = greater, 0


@compiled
def _sample(rows, limits, rank, offset, stride, out, first, last):  # type: ignore[no-untyped-def]
    for row in range(first, last):
        if rank[row] == 0:
            continue
        n = rows[row, N]
        x = array_at(rows[row, ADDRESS], n, limits)
        sample = np.empty((n - offset[row] + stride[row] - 1) // stride[row], limits.dtype)
        _take(x, offset[row], stride[row], limits, sample)
        out[row] = kth_largest(sample, rank[row])
