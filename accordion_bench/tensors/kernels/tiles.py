"""Largest entries of each tile of matrices on a CPU: encoding, and sums of decoded messages.

The format is that of `codecs/matrix_tiles.py`: numbers as float32, then indices within their tiles, then codes of two
bits if the numbers are a table of four.

Tensor suffixes: W workers, A all workers, R rows of sums, T tensors.
"""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from accordion_bench.tensors.kernels.compiled import array_at, bits_of, compiled, f32, f64, i64, owner, u8, u64
from accordion_bench.tensors.kernels.dense_kernels import array_like
from accordion_bench.tensors.kernels.index_codes import put_value, value_at, word_at
from accordion_bench.tensors.kernels.table import addresses, over_tiles
from accordion_bench.tensors.kernels.top import collect, kth_largest, limits

ADDRESS, SIZE, ACROSS, A, B, K, WIDTH, CODED, TILE, ENTRY = range(10)  # columns of a table with one line per row
"""For each worker and tensor: address; coordinates; columns of the matrix; sides of a tile; entries kept per tile; bits
of an index; 1 = the numbers are a table; tiles and entries of previous rows."""

SHAPE = slice(SIZE, TILE)  # columns that depend on the tensor only
BINS = 4


def encode_tiles(
    message_W: Tensor, starts: Sequence[int], rows_W: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], spread: float
) -> np.ndarray:
    """Write the largest magnitudes of each tile of tensors [W, N] into messages [W, B].

    Args:
        message_W: messages.
        starts: first byte of each tensor.
        rows_W: tensors of one dtype with contiguous rows; read as float32.
        shapes: columns SHAPE of each tensor.
        spread: width of a bin, in standard deviations.

    Returns:
        whether a kept value is non-finite; booleans [W T].
    """
    table = table_of(rows_W, shapes)
    steps = message_W.stride(0) * np.arange(len(message_W))[:, None]
    at = (message_W.data_ptr() + steps + np.array(starts, np.int64)).ravel()
    count, entries = int(table[-1, TILE]), int(table[-1, ENTRY])
    places, values = np.empty(entries, np.int32), np.empty(entries, np.float32)
    like = array_like(rows_W[0])
    over_tiles(_choose, count, table, like, limits(np.float32), places, values)
    bad = np.zeros(len(at), bool)
    over_tiles(_write, len(at), table, at, places, values, spread, bad)
    return bad


def add_tiles(
    targets_R: Sequence[Tensor],
    message_A: Tensor,
    starts: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    alpha: float = 1.0,
    divisor: float = 1.0,
) -> None:
    """target = (target + alpha x entries of the messages [A, B] of `encode_tiles`, in order) / divisor.

    Args:
        targets_R: tensors [R, N] of one dtype with contiguous rows; message a adds to row a mod R.
        message_A, starts, shapes: as for `encode_tiles`.
        alpha: factor, as float32.
        divisor: divisor of all coordinates; 1 = none.
    """
    rows, table = len(targets_R[0]), table_of(targets_R, shapes)
    senders = np.arange(rows)[:, None, None] + rows * np.arange(len(message_A) // rows)
    at = message_A.data_ptr() + message_A.stride(0) * senders + np.array(starts, np.int64)[:, None]
    ordered = np.ascontiguousarray(at.reshape(-1, at.shape[2]))  # [row and tensor, sender]
    like = array_like(targets_R[0])
    over_tiles(_add, int(table[-1, TILE]), table, like, ordered, f32(alpha), like.dtype.type(divisor))


def table_of(rows_W: Sequence[Tensor], shapes: Sequence[tuple[int, ...]]) -> np.ndarray:
    """Return a table of rows, int64 [W T + 1, 10]; the last line contains the numbers of tiles and of entries."""
    workers = len(rows_W[0])
    table = np.zeros((workers * len(rows_W) + 1, 10), np.int64)
    table[:-1, ADDRESS] = addresses(rows_W).ravel()
    table[:-1, SHAPE] = np.tile(np.array(shapes, np.int64), (workers, 1))
    tiles = table[:-1, SIZE] // (table[:-1, A] * table[:-1, B])
    table[1:, TILE], table[1:, ENTRY] = tiles.cumsum(), (tiles * table[:-1, K]).cumsum()
    return table


@compiled
def _choose(table, like, limits, places, values, first, last):  # type: ignore[no-untyped-def]
    """Write indices and values of the largest magnitudes of each tile by ascending index."""
    most = 0
    for row in range(table.shape[0] - 1):
        most = max(most, table[row, A] * table[row, B])
    keys, found, some = np.empty(most, np.int32), np.empty(most + 8, np.int32), np.empty(most, np.int32)
    row = 0
    for number in range(first, last):
        row = owner(table, TILE, number, row)
        a, b, k = table[row, A], table[row, B], table[row, K]
        x = array_at(table[row, ADDRESS], table[row, SIZE], like)
        corner = _corner(table[row], number - table[row, TILE])
        for i in range(a):
            line, out = x[corner + i * table[row, ACROSS] :][:b], keys[i * b :][:b]
            for j in range(b):
                out[j] = np.int32(bits_of(f32(line[j])) & np.uint32(0x7FFFFFFF))
        least, ties, count = _least(keys[: a * b], k, limits, found, some)
        at = table[row, ENTRY] + (number - table[row, TILE]) * k
        for i in range(count):
            place = found[i]
            tied = keys[place] == least
            if keys[place] > least or (tied and ties > 0):
                ties -= tied
                places[at] = place
                values[at] = f32(x[corner + place // b * table[row, ACROSS] + place % b])
                at += 1


@compiled
def _corner(columns, tile):  # type: ignore[no-untyped-def]
    """Return the index of the first coordinate of a tile in its matrix."""
    across = columns[ACROSS] // columns[B]
    return tile // across * columns[A] * columns[ACROSS] + tile % across * columns[B]


@compiled
def _least(keys, k, limits, found, some):  # type: ignore[no-untyped-def]
    """Return the k-th largest key, the number of selected keys equal to it, and the number of candidates in `found`.

    The k-th largest of the maxima of groups is a lower bound of the k-th largest key, because k keys reach it. With 2 k
    groups, few other keys reach it.
    """
    groups = (2 * k + 63) // 64 * 64
    bound = i64(0)
    if 2 * groups <= keys.size:
        for g in range(groups):
            some[g] = keys[g]
        for start in range(groups, keys.size, groups):
            block = keys[start : start + groups]
            for g in range(block.size):
                some[g] = max(some[g], block[g])
        bound = kth_largest(some[:groups], k)
    count = collect(keys, limits[0], bound, found)
    for i in range(count):
        some[i] = keys[found[i]]
    least = kth_largest(some[:count], k)
    ties = k
    for i in range(count):
        ties -= keys[found[i]] > least
    return least, ties, count


@compiled
def _write(table, at, places, values, spread, bad, first, last):  # type: ignore[no-untyped-def]
    for row in range(first, last):
        begin, end = table[row, ENTRY], table[row + 1, ENTRY]
        own, entries = values[begin:end], places[begin:end]
        at_indices, at_codes, size = _parts(table[row], end - begin)
        message = array_at(at[row], size, np.empty(0, np.uint8))
        for i in range(own.size):
            bad[row] |= not np.isfinite(own[i])
        _put_bits(entries, table[row, WIDTH], message[at_indices:at_codes])
        if table[row, CODED]:
            codes, numbers = np.empty(own.size, np.int32), np.empty(BINS, np.float32)
            _quantise(own, spread, codes, numbers)
            _put_bits(codes, 2, message[at_codes:size])
            own = numbers
        for i in range(own.size):
            put_value(message, 4 * i, own[i])


@compiled
def _parts(columns, kept):  # type: ignore[no-untyped-def]
    """Return the first bytes of indices and codes in a message of `kept` entries, and its end."""
    at_indices = 4 * (BINS if columns[CODED] else kept)
    at_codes = at_indices + (kept * columns[WIDTH] + 7) // 8
    return at_indices, at_codes, at_codes + ((kept + 3) // 4 if columns[CODED] else 0)


@compiled
def _quantise(values, spread, codes, numbers):  # type: ignore[no-untyped-def]
    """Quantise values; write codes, and the mean of the values of each code, summed in order."""
    total = 0.0
    for v in values:
        total += f64(v)
    mean, squares = total / values.size, 0.0
    for v in values:
        squares += (f64(v) - mean) * (f64(v) - mean)
    step = math.sqrt(squares / max(values.size - 1, 1)) * spread
    sums, members = np.zeros(BINS), np.zeros(BINS, np.int64)
    for i in range(values.size):
        bins = np.rint((f64(values[i]) - mean) / step) if step > 0 else 0.0
        code = i64(min(max(bins + 2.0, 0.0), 3.0))
        codes[i] = code
        sums[code] += f64(values[i])
        members[code] += 1
    for code in range(BINS):
        numbers[code] = f32(sums[code] / max(members[code], 1))


@compiled
def _put_bits(numbers, width, message):  # type: ignore[no-untyped-def]
    """Pack numbers of `width` bits, least significant bit first, padded with zeros."""
    word, fill, at = u64(0), 0, 0
    for i in range(numbers.size):
        word |= u64(numbers[i]) << u64(fill)
        fill += width
        while fill >= 8:
            message[at] = u8(word & u64(255))
            word >>= u64(8)
            fill -= 8
            at += 1
    if fill:
        message[at] = u8(word & u64(255))


@compiled
def _add(table, like, at, alpha, divisor, first, last):  # type: ignore[no-untyped-def]
    """Add all messages to one tile after another, so that the tile stays in the cache.

    An index beyond its tile, in a malformed message, selects the last coordinate of the tile.
    """
    row = 0
    for number in range(first, last):
        row = owner(table, TILE, number, row)
        a, b, k, width = table[row, A], table[row, B], table[row, K], table[row, WIDTH]
        across, tile = table[row, ACROSS], number - table[row, TILE]
        corner, mask = _corner(table[row], tile), u64((1 << width) - 1)
        at_indices, at_codes, size = _parts(table[row], table[row + 1, ENTRY] - table[row, ENTRY])
        x = array_at(table[row, ADDRESS], table[row, SIZE], like)
        for sender in range(at.shape[1]):
            message = array_at(at[row, sender], size, np.empty(0, np.uint8))
            for entry in range(tile * k, (tile + 1) * k):
                bit = entry * width
                index = i64((word_at(message, at_indices + (bit >> 3)) >> u64(bit & 7)) & mask)
                index = min(index, a * b - 1)
                which = i64(message[at_codes + (entry >> 2)] >> u8(2 * (entry & 3))) & 3 if table[row, CODED] else entry
                x[corner + index // b * across + index % b] += value_at(message, 4 * which) * alpha
        if divisor != 1:
            for i in range(a):
                line = x[corner + i * across :][:b]
                for j in range(b):
                    line[j] /= divisor
