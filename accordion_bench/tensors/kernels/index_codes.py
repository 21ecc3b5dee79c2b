"""Sparse messages on a CPU: encoding of values and index codes, and sums of decoded messages.

The format is that of `codecs/packed_codes.py`: l low bits of each index, then a stream with a one at position (high
bits + rank) for each index. A bitmap is a stream with a one at position i for each index i. Messages of signs encode
2 i + (x_i > 0) in place of i.

Tensor suffixes: R rows.
"""

from collections.abc import Sequence

import numpy as np

from accordion_bench.tensors.kernels.compiled import array_at, compiled, f32, i64, ones, u8, u32, u64, zeros_below
from accordion_bench.tensors.kernels.table import over_tiles
from accordion_bench.tensors.kernels.top import (
    ADDRESS,
    EQUAL,
    GREATER,
    SIZE,
    TILE,
    ChosenKeys,
    N,
    Rows,
    collect,
    limits,
)

MESSAGE, KEPT, BY_RANK, LOW, AT_LOW, AT_HIGH, END, SIGNS = range(8)  # columns of `Messages`
"""Address; number of entries; 1 if each entry shifts the high bits of the next by one, else 0; low bits of an entry;
first bytes of low bits and of high bits in the message, and its end; 1 = a message of signs, which begins with the
magnitude."""

RANK, TIES = range(2)  # columns of the state at the begin of a tile: previous entries; equal ones that the tile sends
LOW_BYTE, HIGH_AT, HIGH_BYTE = range(3)  # columns of the first bytes of a tile, which it shares with the previous tile


def messages(
    addresses: np.ndarray, kept: np.ndarray, codes: Sequence[np.ndarray], header: int | None = None
) -> np.ndarray:
    """Return a table of messages, int64 [M, 8].

    Args:
        addresses, kept: address and number of entries of each message.
        codes: shapes of the index codes, int64 arrays [M], see `codecs.packed_codes.code_shapes`.
        header: number of bytes before the codes in messages of signs; None = float32 values precede the codes.
    """
    table = np.zeros((addresses.size, 8), np.int64)
    table[:, MESSAGE], table[:, KEPT] = addresses.ravel(), kept
    table[:, BY_RANK], table[:, LOW], low_bytes, high_bytes = codes
    table[:, AT_LOW] = 4 * table[:, KEPT] if header is None else header
    table[:, AT_HIGH] = table[:, AT_LOW] + low_bytes
    table[:, END] = table[:, AT_HIGH] + high_bytes
    table[:, SIGNS] = header is not None
    return table


def write_entries(chosen: ChosenKeys, table: np.ndarray) -> np.ndarray:
    """Write the selected entries of each row into its message, a row of `table`; messages of signs without the header.

    Returns:
        whether a written value is non-finite as float32; booleans [R].
    """
    rows = chosen.rows
    starts, edges = np.zeros((rows.tiles, 2), np.int64), np.zeros((rows.tiles, 3), np.int64)
    bad, like = np.zeros(rows.tiles + 1, bool), limits(rows.dtype)
    over_tiles(_place, rows.count, rows.table, chosen.kept, chosen.counts, table, starts)
    numbers = np.empty(0, rows.dtype)
    over_tiles(_write, rows.tiles, rows.table, like, numbers, chosen.least, chosen.counts, table, starts, edges, bad)
    over_tiles(_mend, rows.count, rows.table, table, starts, edges)
    return np.logical_or.reduceat(bad, rows.table[:-1, TILE]) & (rows.table[:-1, N] > 0)


def add_entries(
    targets: Rows, table: np.ndarray, until: Sequence[int] | np.ndarray, alpha: float = 1.0, divisor: float = 1.0
) -> None:
    """target = (target + alpha x messages, in order) / divisor.

    Args:
        targets: rows.
        table: messages, ordered by row.
        until: number of messages of previous rows for each row, then the total number, [R + 1].
        alpha: factor of values, as float32; NaN = set coordinates in messages to 0.
        divisor: divisor of all coordinates; 1 = none.
    """
    numbers = np.empty(0, targets.dtype)
    ends = np.asarray(until, np.int64)
    over_tiles(_add, targets.tiles, targets.table, numbers, table, ends, f32(alpha), targets.dtype(divisor))


@compiled
def _place(rows, kept, counts, table, starts, first, last):  # type: ignore[no-untyped-def]
    """Compute the start of each tile in the message of its row, and clear the codes."""
    for row in range(first, last):
        begin, end = rows[row, TILE], rows[row + 1, TILE]
        ties, rank = kept[row], 0
        for tile in range(begin, end):
            ties -= counts[tile, GREATER]
        for tile in range(begin, end):
            starts[tile, RANK], starts[tile, TIES] = rank, min(ties, counts[tile, EQUAL])
            rank += counts[tile, GREATER] + starts[tile, TIES]
            ties -= starts[tile, TIES]
        message = array_at(table[row, MESSAGE], table[row, END], np.empty(0, u8))
        for at in range(table[row, AT_LOW], table[row, END]):
            message[at] = 0


@compiled
def _write(rows, limits, like, least, counts, table, starts, edges, bad, first, last):  # type: ignore[no-untyped-def]
    """Write values and codes of each tile; the first bytes of the codes go to `edges`."""
    magnitude = limits[0]
    places = np.empty(SIZE + 8, np.int32)
    words = np.empty(SIZE, u64)
    for row in range(rows.shape[0] - 1):
        begin, n = rows[row, TILE], rows[row, N]
        keys, numbers = array_at(rows[row, ADDRESS], n, limits), array_at(rows[row, ADDRESS], n, like)
        message = array_at(table[row, MESSAGE], table[row, END], np.empty(0, u8))
        low, by_rank = table[row, LOW], table[row, BY_RANK]
        at_low, at_high = table[row, AT_LOW], table[row, AT_HIGH]
        for tile in range(max(first, begin), min(last, rows[row + 1, TILE])):
            start, rank = (tile - begin) * SIZE, starts[tile, RANK]
            x = keys[start : start + SIZE]
            found = collect(x, magnitude, least[row], places)
            if starts[tile, TIES] < counts[tile, EQUAL]:
                found = _without_late_ties(x, limits, least[row], starts[tile, TIES], places[:found])
            if found == 0:
                continue
            entries = places[:found]
            if table[row, SIGNS]:
                for i in range(found):
                    entries[i] = 2 * entries[i] + (numbers[start + entries[i]] > 0)
                start *= 2
            else:
                bad[tile] = _put_values(numbers[start : start + SIZE], entries, message[4 * rank :])
            edges[tile, LOW_BYTE] = _put_low(entries, start, low, rank, message[at_low:], words)
            at, byte = _put_high(entries, start, low, by_rank, rank, message[at_high:], words)
            edges[tile, HIGH_AT], edges[tile, HIGH_BYTE] = at, byte


@compiled
def _mend(rows, table, starts, edges, first, last):  # type: ignore[no-untyped-def]
    """Merge the first bytes of the codes of each tile with the last bytes of the previous tile."""
    for row in range(first, last):
        message = array_at(table[row, MESSAGE], table[row, END], np.empty(0, u8))
        for tile in range(rows[row, TILE], rows[row + 1, TILE]):
            if edges[tile, LOW_BYTE]:
                at = table[row, AT_LOW] + (starts[tile, RANK] * table[row, LOW] >> 3)
                message[at] |= u8(edges[tile, LOW_BYTE])
            if edges[tile, HIGH_BYTE]:
                message[table[row, AT_HIGH] + edges[tile, HIGH_AT]] |= u8(edges[tile, HIGH_BYTE])


@compiled
def _without_late_ties(x, limits, least, ties, places):  # type: ignore[no-untyped-def]
    """Keep only the first entries among those with key `least`; return the number of kept entries."""
    left = 0
    for i in range(places.size):
        place = places[i]
        tied = min(x[place] & limits[0], limits[1]) == least
        if not tied or ties > 0:
            places[left] = place
            left += 1
        ties -= tied
    return left


@compiled
def _put_values(x, places, message):  # type: ignore[no-untyped-def]
    """Write numbers as float32 to unaligned bytes; return whether one is non-finite."""
    bad = False
    for i in range(places.size):
        value = f32(x[places[i]])
        bad |= not np.isfinite(value)
        put_value(message, 4 * i, value)
    return bad


@compiled
def _put_low(indices, start, low, rank, message, words):  # type: ignore[no-untyped-def]
    """Write the low bits of indices start + index from a rank on, except for the first byte, which is returned."""
    if low == 0:
        return i64(0)
    fill = rank * low & 7
    mask, word, at = u64((1 << low) - 1), u64(0), 0
    for i in range(indices.size):
        bits = u64(start + indices[i]) & mask
        word |= bits << u64(fill)
        fill += low
        if fill >= 64:
            words[at] = word
            at += 1
            fill -= 64
            word = bits >> u64(low - fill)
    words[at] = word
    return _store(words, (64 * at + fill + 7) >> 3, message, rank * low >> 3)


@compiled
def _put_high(indices, start, low, by_rank, rank, message, words):  # type: ignore[no-untyped-def]
    """Write the high bits of indices start + index from a rank on; return position and value of the first byte."""
    last = indices.size - 1
    origin = ((start + indices[0]) >> low) + by_rank * rank >> 3
    shift = by_rank * rank - 8 * origin
    end = ((start + indices[last]) >> low) + by_rank * last + shift
    for at in range((end >> 6) + 1):
        words[at] = 0
    word, before = u64(0), 0
    for i in range(indices.size):
        bit = ((start + indices[i]) >> low) + by_rank * i + shift
        at = bit >> 6
        word = (word if at == before else u64(0)) | u64(1) << u64(bit & 63)
        words[at] = word
        before = at
    return origin, _store(words, (end >> 3) + 1, message, origin)


@compiled
def _store(words, nbytes, message, at):  # type: ignore[no-untyped-def]
    """Write the bytes of words into a message from `at` on, except for the first byte, which is returned."""
    stream = words.view(u8)
    for i in range(1, nbytes):
        message[at + i] = stream[i]
    return i64(stream[0])


@compiled
def word_at(message, at):  # type: ignore[no-untyped-def]
    """Read eight bytes of a message as a little-endian word; zeros after its end."""
    word = u64(0)
    if at + 8 <= message.size:
        eight = message[at : at + 8]
        for byte in range(8):
            word |= u64(eight[byte]) << u64(8 * byte)
    else:
        for byte in range(message.size - at):
            word |= u64(message[at + byte]) << u64(8 * byte)
    return word


@compiled
def value_at(message, at):  # type: ignore[no-untyped-def]
    """Read a float32 at unaligned bytes."""
    word = u32(0)
    for byte in range(4):
        word |= u32(message[at + byte]) << u32(8 * byte)
    return u32(word).view(f32)


@compiled
def put_value(message, at, value):  # type: ignore[no-untyped-def]
    """Write a float32 to unaligned bytes."""
    word = f32(value).view(u32)
    for byte in range(4):
        message[at + byte] = u8(word >> u32(8 * byte))


@compiled
def _add(rows, like, table, until, alpha, divisor, first, last):  # type: ignore[no-untyped-def]
    """Add all messages to one tile after another, so that the tile stays in the cache."""
    positions, ranks = np.zeros(table.shape[0], np.int64), np.zeros(table.shape[0], np.int64)
    for row in range(rows.shape[0] - 1):
        begin, n = rows[row, TILE], rows[row, N]
        target = array_at(rows[row, ADDRESS], n, like)
        for tile in range(max(first, begin), min(last, rows[row + 1, TILE])):
            start = (tile - begin) * SIZE
            x = target[start : start + SIZE]
            for one in range(until[row], until[row + 1]):
                if tile == first:
                    positions[one], ranks[one] = _cursor_at(table[one], start)
                positions[one], ranks[one] = _add_tile(x, start, table[one], alpha, positions[one], ranks[one])
            if divisor != 1:
                for i in range(x.size):
                    x[i] /= divisor


@compiled
def _cursor_at(columns, start):  # type: ignore[no-untyped-def]
    """Return a position in the stream of high bits before all indices from `start` on, and the rank there."""
    stream = array_at(columns[MESSAGE] + columns[AT_HIGH], columns[END] - columns[AT_HIGH], np.empty(0, u8))
    wanted = ((1 + columns[SIGNS]) * start) >> columns[LOW]
    position, rank = 0, 0
    while position < 8 * stream.size:
        within = i64(ones(word_at(stream, position >> 3)))
        if position + 64 - columns[BY_RANK] * (rank + within) > wanted:
            break
        position, rank = position + 64, rank + within
    return position, rank


@compiled
def _add_tile(x, start, columns, alpha, position, rank):  # type: ignore[no-untyped-def]
    """Add the entries of a message with coordinates in the tile from `start` on; return position and rank after them.

    Entries of malformed messages outside of the tile are ignored.
    """
    message = array_at(columns[MESSAGE], columns[END], np.empty(0, u8))
    kept, low, by_rank, signs = columns[KEPT], columns[LOW], columns[BY_RANK], columns[SIGNS]
    at_low, at_high = columns[AT_LOW], columns[AT_HIGH]
    mask = u64((1 << low) - 1)
    behind = u64(0xFFFFFFFFFFFFFFFF) << u64(position & 63)
    position &= -64
    while at_high + (position >> 3) < message.size and rank < kept:
        word = word_at(message, at_high + (position >> 3)) & behind
        while word and rank < kept:
            bit = position + i64(zeros_below(word))
            at = rank * low
            entry = ((bit - by_rank * rank) << low) | i64((word_at(message, at_low + (at >> 3)) >> u64(at & 7)) & mask)
            place = (entry >> signs) - start
            if place >= x.size:
                return bit, rank
            if place >= 0:
                if signs:
                    value = value_at(message, 0) * (alpha if entry & 1 else -alpha)
                else:
                    value = value_at(message, 4 * rank) * alpha
                x[place] = x[place] + value if alpha == alpha else 0
            rank += 1
            word &= word - u64(1)
        behind = u64(0xFFFFFFFFFFFFFFFF)
        position += 64
    return position, rank
