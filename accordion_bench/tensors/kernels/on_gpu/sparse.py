"""Sparse messages on a GPU: encoding of entries as values and `codecs.packed_codes`, and sums of decoded messages.

Tensor suffixes: W workers, S senders, R rows of the sums, T tensors, K entries of all tensors.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton import jit

from accordion_bench.tensors import upload
from accordion_bench.tensors.kernels.on_gpu.launch import KEPT, TYPES, launch, parts_of
from accordion_bench.tensors.kernels.on_gpu.selection import Entries, before
from accordion_bench.tensors.kernels.on_gpu.sums import read_float, write_float

COLUMNS = tl.constexpr(12)
N, ENTRIES, FIRST, HEAD, LOWS, HIGHS, BY_RANK, LOW, LOW_BYTES, HIGH_BYTES, LOW_WORD, HIGH_WORD = (
    tl.constexpr(column) for column in range(COLUMNS.value)
)
"""Columns of a tensor: coordinates; entries; entries of previous tensors; first byte in a message of values (or scale
and count), of low bits and of high bits of indices; whether each entry shifts the high bits of the next by one; low
bits of an index; bytes of low bits and of high bits; first words of both in the buffer of codes."""

TOGETHER = 1024  # entries, or bytes, per program
CHUNK = tl.constexpr(128)  # bytes of high bits per decoding program; larger chunks reduce occupancy


class Sections:
    """Offsets of the entries of each tensor in messages of one length. Compared by identity, so create it once.

    Args:
        n: number of coordinates of each tensor, at most 2^30.
        kept: number of entries of each tensor.
        at: first byte in a message of values (or scale and count), and of index codes. Values of a tensor with a
            negative offset are not written.
        shapes: shapes of the codes, see `codecs.packed_codes.code_shapes`.
        signs: whether an entry is one scale with a sign.
        first: index of the first entry of each tensor in the buffer of entries; None = contiguous.

    Attributes:
        rows: int64 [T, COLUMNS].
        kept, words: number of entries, and of words of codes, of all tensors.
        low_reads: number of bytes to read for the low bits of an index.
    """

    def __init__(
        self,
        n: np.ndarray,
        kept: np.ndarray,
        at: tuple[np.ndarray, np.ndarray],
        shapes: tuple[np.ndarray, ...],
        signs: bool = False,
        first: np.ndarray | None = None,
    ) -> None:
        (by_rank, low, low_bytes, high_bytes), (heads, codes) = shapes, at
        low_words, high_words = -(-low_bytes // 4), -(-high_bytes // 4)
        first_word = (low_words + high_words).cumsum() - low_words - high_words
        entries = kept.cumsum() - kept if first is None else first
        columns = [n, kept, entries, heads, codes, codes + low_bytes, by_rank, low, low_bytes, high_bytes]
        self.rows = np.stack([*columns, first_word, first_word + low_words], axis=1).astype(np.int64)
        self.kept, self.words, self.signs = int(kept.sum()), int((low_words + high_words).sum()), signs
        self.low_reads = -(-(int(low.max(initial=0)) + 7) // 8) if low.any() else 0

    @functools.cached_property
    def chunks(self) -> np.ndarray:
        """Number of chunks of high bits of each tensor."""
        return -(-self.rows[:, HIGH_BYTES.value] // CHUNK.value)


class Tables(NamedTuple):
    """Sections on a GPU.

    sections: the sections.
    rows: int64 [T, COLUMNS].
    entries, chunks: parts of the entries and of the high bits of each tensor, int64 [P, 2].
    codes: first word, first byte in a message and number of bytes of the low bits and of the high bits of each tensor,
        int64 [2 T, 3].
    of_codes: parts of `codes`, int64 [P, 2].
    first_chunk: chunks of previous tensors, int64 [T].
    """

    sections: Sections
    rows: Tensor
    entries: Tensor
    codes: Tensor
    of_codes: Tensor
    chunks: Tensor
    first_chunk: Tensor

    @classmethod
    def of(cls, own: Sections, there: torch.device, put: Callable[[Tensor, torch.device], Tensor]) -> Self:
        """Return the tables of sections, in one upload."""
        parts = ((LOW_WORD, LOWS, LOW_BYTES), (HIGH_WORD, HIGHS, HIGH_BYTES))
        codes = np.concatenate([np.stack([own.rows[:, column.value] for column in part], axis=1) for part in parts])
        of_entries = parts_of(-(-own.rows[:, ENTRIES.value] // TOGETHER), TOGETHER)
        of_codes = parts_of(-(-codes[:, 2] // TOGETHER), TOGETHER)
        of_chunks = parts_of(own.chunks, CHUNK.value)
        each = [own.rows, of_entries, codes, of_codes, of_chunks, own.chunks.cumsum() - own.chunks]
        flat = put(torch.from_numpy(np.concatenate([one.ravel() for one in each])), there)
        found = (x.view(one.shape) for x, one in zip(flat.split([one.size for one in each]), each, strict=True))
        return cls(own, *found)


@functools.lru_cache(maxsize=KEPT)
def tables_on(own: Sections, there: torch.device) -> Tables:
    """Return the tables of sections that are equal in every step; cached."""
    return Tables.of(own, there, upload.table)


def write_entries(entries: Entries, on: Tables, message: Tensor) -> None:
    """Write entries, ascending in each tensor, into messages, uint8 [W, B]."""
    there, W, size, own = message.device, len(message), entries.indices.shape[1], on.sections
    words = torch.zeros(W, own.words, dtype=torch.int32, device=there)
    to, constants = (words, own.words, message, message.stride(0)), {"TOGETHER": TOGETHER, "SIGNS": own.signs}
    launch(_write_entries, (len(on.entries), W), there, on.rows, on.entries, *entries, size, *to, **constants)
    launch(_write_codes, (len(on.of_codes), W), there, on.codes, on.of_codes, *to, TOGETHER=TOGETHER)


def write_heads(scales: Tensor, on: Tables, message: Tensor) -> None:
    """Write the scale, float32 [T], and the number of entries of each tensor into a message, uint8 [B]."""
    T = len(on.rows)
    launch(_write_heads, (-(-T // TOGETHER),), message.device, on.rows, T, scales, message, TOGETHER=TOGETHER)


def add_entries(targets: np.ndarray, on: Tables, message: Tensor, alpha: float, like: Tensor, senders: int = 1) -> None:
    """Add alpha x the entries of each sender, in order, to target [R, N].

    One launch per R senders. Indices beyond the tensor are ignored.

    Args:
        targets: addresses of the sums, int64 [R, T]; sender s adds to row s mod R.
        on: sections of the entries.
        message: messages of the senders, uint8 [S, B].
        alpha: factor of the values; NaN = set sums to 0 at the entries.
        like: tensor with the dtype and the device of the sums.
        senders: number of senders in one row of `message`, each with its own sections.
    """
    there, R, S, C, own = message.device, len(targets), len(message), len(on.chunks), on.sections
    counts = torch.empty(S, C, dtype=torch.int32, device=there)
    launch(_count_ones, (C, S), there, on.rows, on.chunks, message, message.stride(0), counts, C)
    if not C:
        return
    until = counts.cumsum(1, dtype=torch.int32)
    order = np.arange(max(S, senders)) % R
    uploaded, T = upload.upload(torch.from_numpy(targets[order]), there), len(on.rows)
    ends = own.chunks.reshape(senders, -1).sum(1).cumsum().tolist()
    constants = {"TYPE": TYPES[like.dtype], "LOW_READS": own.low_reads, "SIGNS": own.signs, "CLEARS": math.isnan(alpha)}
    for first in range(0, max(S, senders), R):
        last = min(first + R, max(S, senders))
        if senders == 1:
            begin, grid, of = 0, (C, last - first), slice(first, last)
        else:
            begin, of = ends[first - 1] if first else 0, slice(0, 1)
            grid = (ends[last - 1] - begin, 1)
        launch(
            _add_entries,
            grid,
            there,
            *(uploaded[of], T, on.rows, on.chunks, on.first_chunk, begin, until[of], C),
            *(message[of], message.stride(0), float(alpha)),
            **constants,
        )


@jit
def _write_entries(  # type: ignore[no-untyped-def]
    rows, parts, indices, values, K, words, WORDS, message, row_bytes, TOGETHER: tl.constexpr, SIGNS: tl.constexpr
):
    p, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t, begin = tl.load(parts + 2 * p), tl.load(parts + 2 * p + 1)
    row, own = rows + t * COLUMNS, words + w * WORDS
    rank = begin.to(tl.int32) + tl.arange(0, TOGETHER)
    exists = rank < tl.load(row + ENTRIES)
    at = w * K + tl.load(row + FIRST)
    index = tl.load(indices + at + rank, mask=exists, other=0)
    value = tl.load(values + at + rank, mask=exists, other=0)
    if SIGNS:
        index = 2 * index + (value > 0).to(tl.int32)
    elif tl.load(row + HEAD) >= 0:
        write_float(message + w * row_bytes + tl.load(row + HEAD) + 4 * rank, value, exists)
    # an index code of n coordinates has at most n bits, so int32 suffices
    low, by_rank = tl.load(row + LOW).to(tl.int32), tl.load(row + BY_RANK).to(tl.int32)
    if tl.load(row + HIGH_BYTES) > 0:
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
def _write_heads(rows, T, scales, message, TOGETHER: tl.constexpr):  # type: ignore[no-untyped-def]
    t = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    row, exists = rows + t * COLUMNS, t < T
    out = message + tl.load(row + HEAD, mask=exists, other=0)
    write_float(out, tl.load(scales + t, mask=exists, other=0), exists)
    count = tl.load(row + ENTRIES, mask=exists, other=0).to(tl.int32)
    write_float(out + 4, count.to(tl.float32, bitcast=True), exists)


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


@jit(do_not_specialize=["first"])
def _add_entries(  # type: ignore[no-untyped-def]
    targets, T, rows, chunks, first_chunk, first, until, C, message, row_bytes, alpha,
    TYPE: tl.constexpr, LOW_READS: tl.constexpr, SIGNS: tl.constexpr, CLEARS: tl.constexpr,
):  # fmt: skip
    c, s = first + tl.program_id(0), tl.program_id(1).to(tl.int64)
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
    head = own + tl.load(row + HEAD)
    if SIGNS:
        scale = read_float(head, True) * alpha
        value = tl.where((index & 1) > 0, scale, -scale)
        index >>= 1
    else:
        value = read_float(head + 4 * rank, exists) * alpha
    exists = exists & (index >= 0) & (index < tl.load(row + N))
    target = tl.load(targets + s * T + t).to(tl.pointer_type(TYPE)) + index
    if CLEARS:
        tl.store(target, tl.zeros(target.shape, TYPE), mask=exists)
    else:
        tl.store(target, tl.load(target, mask=exists, other=0) + value.to(TYPE), mask=exists)
