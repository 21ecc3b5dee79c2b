"""Entries of tensors into messages and from there into sums: values, and indices as `codecs.index_codes` has them.

Tensor suffixes: W workers, S senders, R rows of the sums, T tensors, K entries of all tensors.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton import jit

from accordion_bench.tensors import upload
from accordion_bench.tensors.kernels.on_gpu.blocks import parts_on
from accordion_bench.tensors.kernels.on_gpu.launch import TYPES, launch
from accordion_bench.tensors.kernels.on_gpu.selection import Entries, before
from accordion_bench.tensors.kernels.on_gpu.sums import read_float, write_float
from accordion_bench.tensors.kernels.on_gpu.table import KEPT

COLUMNS = tl.constexpr(12)
N, ENTRIES, FIRST, VALUES, LOWS, HIGHS, BY_RANK, LOW, LOW_BYTES, HIGH_BYTES, LOW_WORD, HIGH_WORD = (
    tl.constexpr(column) for column in range(COLUMNS.value)
)
"""Columns of a tensor: coordinates; entries; entries of the tensors before; where in a message its values, the low bits
of its indices and the high ones begin, in bytes; whether a high bit moves on for each entry before it; low bits of an
index; bytes of low bits and of high bits; where these begin, in words, where codes are made."""

TOGETHER = 1024  # entries, or bytes, of a program
CHUNK = tl.constexpr(128)  # bytes of high bits that a program decodes; of more, few fit on a GPU at once


class Sections:
    """Where the entries of each tensor are in a message. Compared by identity: make it once.

    Args:
        n: coordinates of each tensor, at most 2^30.
        kept: entries.
        values, codes: where in a message they begin, in bytes.
        shapes: of the codes, see `codecs.index_codes.code_shapes`.
    """

    def __init__(
        self, n: np.ndarray, kept: np.ndarray, values: np.ndarray, codes: np.ndarray, shapes: tuple[np.ndarray, ...]
    ) -> None:
        by_rank, low, low_bytes, high_bytes = shapes
        low_words, high_words = -(-low_bytes // 4), -(-high_bytes // 4)
        first_word = (low_words + high_words).cumsum() - low_words - high_words
        columns = [n, kept, kept.cumsum() - kept, values, codes, codes + low_bytes, by_rank, low, low_bytes, high_bytes]
        self.rows = np.stack([*columns, first_word, first_word + low_words], axis=1).astype(np.int64)
        self.kept, self.words = int(kept.sum()), int((low_words + high_words).sum())
        self.low_reads = -(-(int(low.max(initial=0)) + 7) // 8) if low.any() else 0


class Tables(NamedTuple):
    """The same on a GPU.

    rows: int64 [T, COLUMNS].
    entries, chunks: parts of each tensor's entries and high bits, int64 [P, 2].
    codes: of the low bits of each tensor and of the high ones, int64 [2 T, 3]: the first word, the first byte in a
        message, and bytes.
    of_codes: parts of these, int64 [P, 2].
    first_chunk: chunks of the tensors before, int64 [T].
    """

    rows: Tensor
    entries: Tensor
    codes: Tensor
    of_codes: Tensor
    chunks: Tensor
    first_chunk: Tensor


@functools.lru_cache(maxsize=KEPT)
def tables_on(own: Sections, there: torch.device) -> Tables:
    """Sections on a GPU."""
    low, high = ((LOW_WORD, LOWS, LOW_BYTES), (HIGH_WORD, HIGHS, HIGH_BYTES))
    codes = np.concatenate([np.stack([own.rows[:, column.value] for column in part], axis=1) for part in (low, high)])
    chunks = -(-own.rows[:, HIGH_BYTES.value] // CHUNK.value)
    return Tables(
        upload.table(torch.from_numpy(own.rows), there),
        parts_of(own.rows[:, ENTRIES.value], TOGETHER, there),
        upload.table(torch.from_numpy(codes), there),
        parts_of(codes[:, 2], TOGETHER, there),
        parts_of(own.rows[:, HIGH_BYTES.value], CHUNK.value, there),
        upload.table(torch.from_numpy(chunks.cumsum() - chunks), there),
    )


def parts_of(counts: np.ndarray, size: int, there: torch.device) -> Tensor:
    """Parts of so many entries or bytes, see `parts_on`."""
    return parts_on(tuple((-(-counts // size)).tolist()), size, there)


def write_entries(entries: Entries, own: Sections, message: Tensor) -> None:
    """Write entries, ascending in each tensor, into messages, uint8 [W, B]."""
    there, W, on = message.device, len(message), tables_on(own, message.device)
    words = torch.zeros(W, own.words, dtype=torch.int32, device=there)
    to = (words, own.words, message, message.stride(0))
    launch(_write_entries, (len(on.entries), W), there, on.rows, on.entries, *entries, own.kept, *to, TOGETHER=TOGETHER)
    launch(_write_codes, (len(on.of_codes), W), there, on.codes, on.of_codes, *to, TOGETHER=TOGETHER)


def add_entries(targets: np.ndarray, own: Sections, message: Tensor, alpha: float, like: Tensor) -> None:
    """target [R, N] += alpha x the entries of each sender, in their order.

    One launch for R senders; what a message says of coordinates that do not exist is not followed.

    Args:
        targets: addresses of the sums, int64 [R, T]; sender s goes to row s mod R.
        own: where entries are.
        message: of the senders, uint8 [S, B].
        alpha: by which values are multiplied first.
        like: a tensor of the type of the sums.
    """
    there, (R, T), S = message.device, targets.shape, len(message)
    on = tables_on(own, there)
    C = len(on.chunks)
    counts = torch.empty(S, C, dtype=torch.int32, device=there)
    launch(_count_ones, (C, S), there, on.rows, on.chunks, message, message.stride(0), counts, C)
    if not C:
        return
    until = counts.cumsum(1, dtype=torch.int32)
    uploaded = upload.upload(torch.from_numpy(targets), there)
    for first in range(0, S, R):
        launch(
            _add_entries,
            (C, min(R, S - first)),
            there,
            *(uploaded, T, on.rows, on.chunks, on.first_chunk, until[first:], C),
            *(message[first:], message.stride(0), float(alpha)),
            TYPE=TYPES[like.dtype],
            LOW_READS=own.low_reads,
        )


@jit
def _write_entries(  # type: ignore[no-untyped-def]
    rows, parts, indices, values, K, words, WORDS, message, row_bytes, TOGETHER: tl.constexpr
):
    p, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t, begin = tl.load(parts + 2 * p), tl.load(parts + 2 * p + 1)
    row, own = rows + t * COLUMNS, words + w * WORDS
    rank = begin.to(tl.int32) + tl.arange(0, TOGETHER)
    exists = rank < tl.load(row + ENTRIES)
    at = w * K + tl.load(row + FIRST)
    index = tl.load(indices + at + rank, mask=exists, other=0)
    value = tl.load(values + at + rank, mask=exists, other=0)
    write_float(message + w * row_bytes + tl.load(row + VALUES) + 4 * rank, value, exists)
    # an index code of n coordinates has at most n bits
    low, by_rank = tl.load(row + LOW).to(tl.int32), tl.load(row + BY_RANK).to(tl.int32)
    bit = (index >> low) + by_rank * rank
    one = tl.full([TOGETHER], 1, tl.int32) << (bit & 31)
    tl.atomic_or(own + tl.load(row + HIGH_WORD) + (bit >> 5), one, mask=exists, sem="relaxed")
    if low > 0:
        bit = rank * low
        bits = (index & ((1 << low) - 1)).to(tl.uint64) << (bit & 31).to(tl.uint64)
        out, beyond = own + tl.load(row + LOW_WORD) + (bit >> 5), (bits >> 32).to(tl.int32)
        tl.atomic_or(out, bits.to(tl.int32), mask=exists, sem="relaxed")
        tl.atomic_or(out + 1, beyond, mask=exists & (beyond != 0), sem="relaxed")


@jit
def _write_codes(codes, parts, words, WORDS, message, row_bytes, TOGETHER: tl.constexpr):  # type: ignore[no-untyped-def]
    p, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    code, begin = codes + 3 * tl.load(parts + 2 * p), tl.load(parts + 2 * p + 1)
    nbytes, b = tl.load(code + 2), begin.to(tl.int32) + tl.arange(0, TOGETHER)
    word = tl.load(words + w * WORDS + tl.load(code) + (b >> 2), mask=b < nbytes, other=0)
    tl.store(message + w * row_bytes + tl.load(code + 1) + b, (word >> (8 * (b & 3))).to(tl.uint8), mask=b < nbytes)


@jit
def _count_ones(rows, chunks, message, row_bytes, counts, C):  # type: ignore[no-untyped-def]
    c, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t, begin = tl.load(chunks + 2 * c), tl.load(chunks + 2 * c + 1)
    row = rows + t * COLUMNS
    own = message + s * row_bytes + tl.load(row + HIGHS) + begin
    b = tl.arange(0, CHUNK)
    bits = tl.load(own + b, mask=begin + b < tl.load(row + HIGH_BYTES), other=0).to(tl.int32)
    bits = bits - ((bits >> 1) & 0x55)
    bits = (bits & 0x33) + ((bits >> 2) & 0x33)
    tl.store(counts + s * C + c, tl.sum((bits + (bits >> 4)) & 0x0F, axis=0))


@jit
def _add_entries(  # type: ignore[no-untyped-def]
    targets, T, rows, chunks, first_chunk, until, C, message, row_bytes, alpha,
    TYPE: tl.constexpr, LOW_READS: tl.constexpr,
):  # fmt: skip
    c, s = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t, begin = tl.load(chunks + 2 * c), tl.load(chunks + 2 * c + 1)
    row, own = rows + t * COLUMNS, message + s * row_bytes
    position = begin.to(tl.int32) * 8 + tl.arange(0, 8 * CHUNK)
    there = (position >> 3) < tl.load(row + HIGH_BYTES)
    byte = tl.load(own + tl.load(row + HIGHS) + (position >> 3), mask=there, other=0).to(tl.int32)
    one = (byte >> (position & 7)) & 1
    already = before(until + s * C, c) - before(until + s * C, tl.load(first_chunk + t))
    rank = already + tl.cumsum(one, axis=0) - one
    exists = (one > 0) & (rank < tl.load(row + ENTRIES))
    low, by_rank = tl.load(row + LOW).to(tl.int32), tl.load(row + BY_RANK).to(tl.int32)
    index = (position - by_rank * rank) << low
    if LOW_READS > 0:
        bit, lows, low_bytes = rank * low, own + tl.load(row + LOWS), tl.load(row + LOW_BYTES)
        word = tl.zeros([8 * CHUNK], tl.uint64)
        for b in tl.static_range(LOW_READS):
            some = exists & ((bit >> 3) + b < low_bytes)
            word |= tl.load(lows + (bit >> 3) + b, mask=some, other=0).to(tl.uint64) << (8 * b)
        index += (word >> (bit & 7).to(tl.uint64)).to(tl.int32) & ((1 << low) - 1)
    exists = exists & (index >= 0) & (index < tl.load(row + N))
    value = read_float(own + tl.load(row + VALUES) + 4 * rank, exists) * alpha
    target = tl.load(targets + s * T + t).to(tl.pointer_type(TYPE)) + index
    tl.store(target, tl.load(target, mask=exists, other=0) + value.to(TYPE), mask=exists)
