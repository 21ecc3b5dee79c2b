"""Sparse messages on a CPU, all tensors at once: written from gradients, and added to sums, by kernels.

Imported where `kernels.usable` has said that they are: this module needs numba.

Tensor suffixes: W local workers, A all workers, R rows, T tensors, N elements, B bytes.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from accordion_bench.codecs import index_codes
from accordion_bench.codecs.non_finite import NonFiniteRow
from accordion_bench.codecs.selection import EXPECTED, stride_of
from accordion_bench.tensors.kernels.index_codes import END, Codes, add_entries, messages, write_entries
from accordion_bench.tensors.kernels.rows import N, Rows, sent_to_rows
from accordion_bench.tensors.kernels.top import (
    Chosen,
    choose_from,
    choose_largest,
    key,
    leave_zeros,
    sampled_keys,
)

# ---- messages of a known size, in one buffer


def encode_largest_(message_W: Tensor, starts: Sequence[int], rows_W: Sequence[Tensor], kept: Sequence[int]) -> None:
    """Write the largest magnitudes of tensors [W, N] into a buffer, as `index_codes.encode_sparse` has them.

    Args:
        message_W: bytes [W, B].
        starts: where in it the message of each tensor begins.
        rows_W: tensors of one type, every row contiguous.
        kept: entries of each.

    Raises:
        NonFiniteRow: a value is NaN or infinite; row w T + t is worker w's part of tensor t.
    """
    workers, rows = len(message_W), Rows(rows_W)
    codes = codes_of(tuple(x_W.shape[1] for x_W in rows_W), tuple(kept), workers)
    steps = message_W.stride(0) * np.arange(workers)[:, None]
    wanted = np.tile(kept, workers)
    table = messages(message_W.data_ptr() + steps + np.array(starts, np.int64), wanted, codes)
    refuse_non_finite(write_entries(rows, choose_largest(rows, wanted), table))


def add_sparse_(
    targets_R: Sequence[Tensor],
    message_A: Tensor,
    starts: Sequence[int],
    kept: Sequence[int],
    alpha: float = 1.0,
    divisor: float = 1.0,
) -> None:
    """target [R, N] += alpha x what the messages hold, in order, row a into target row a mod R; then / divisor.

    Args:
        targets_R: tensors of one type, every row contiguous.
        message_A: bytes [A, B], as `encode_largest_` writes them.
        starts, kept: as there.
        alpha: factor, as float32.
        divisor: of all coordinates; 1 = none.
    """
    rows, tensors = len(targets_R[0]), len(targets_R)
    at = sent_to_rows(message_A, starts, rows)
    each = at.shape[2]
    codes = codes_of(tuple(x_R.shape[1] for x_R in targets_R), tuple(kept), rows)
    codes = Codes(*(column.repeat(each) for column in codes))
    table = messages(at, np.tile(kept, rows).repeat(each), codes)
    add_entries(Rows(targets_R), table, each * np.arange(rows * tensors + 1), alpha, divisor)


@functools.lru_cache(64)
def codes_of(sizes: tuple[int, ...], kept: tuple[int, ...], times: int) -> Codes:
    """What the index codes of some tensors consist of, so many times; remembered."""
    shapes = index_codes.code_shapes(np.array(sizes, np.int64), np.array(kept, np.int64))
    return Codes(*(np.tile(column, times) for column in shapes))


# ---- messages of any size, each by itself


def encode_chosen(rows: Rows, chosen: Chosen, tensors: int, header: int | None = None) -> list[list[Tensor]]:
    """What is chosen of tensors as messages, [T][W].

    Args:
        rows: coordinates.
        chosen: of them.
        tensors: T.
        header: bytes left free before entries that are told by their signs; None: float32 values stand there.

    Raises:
        NonFiniteRow: as `encode_largest_`, of values.
    """
    codes = Codes(*index_codes.code_shapes(rows.table[:-1, N] * (1 if header is None else 2), chosen.kept))
    sizes = codes.low_bytes + codes.high_bytes + (4 * chosen.kept if header is None else header)
    whole = torch.empty(int(sizes.sum()), dtype=torch.uint8)
    bad = write_entries(rows, chosen, messages(whole.data_ptr() + sizes.cumsum() - sizes, chosen.kept, codes, header))
    if header is None:
        refuse_non_finite(bad)
    parts = whole.split(sizes.tolist())
    return [list(parts[t::tensors]) for t in range(tensors)]


def add_chosen_(
    targets_R: Sequence[Tensor],
    messages_A: Sequence[Sequence[Tensor]],
    kept: Sequence[Sequence[int]],
    alpha: float = 1.0,
    divisor: float = 1.0,
    header: int | None = None,
) -> None:
    """The same as `add_sparse_` for messages of any size, [T][A], with so many entries each.

    Raises:
        ValueError: a message has not the size that so many entries need.
    """
    rows = len(targets_R[0])
    of_row = [(t, r) for r in range(rows) for t in range(len(targets_R))]
    at = [message.data_ptr() for t, r in of_row for message in messages_A[t][r::rows]]
    counts = np.array([k for t, r in of_row for k in kept[t][r::rows]], np.int64)
    senders = np.array([len(messages_A[t][r::rows]) for t, r in of_row])
    n = np.array([targets_R[t].shape[1] for t, _ in of_row], np.int64) * (1 if header is None else 2)
    codes = Codes(*index_codes.code_shapes(n.repeat(senders), counts))
    table = messages(np.array(at, np.int64), counts, codes, header)
    sizes = [len(message) for t, r in of_row for message in messages_A[t][r::rows]]
    if (counts < 0).any() or (table[:, END] != sizes).any():
        raise ValueError("a sparse message has not the size that its entries need")
    add_entries(Rows(targets_R), table, np.concatenate([[0], senders.cumsum()]), alpha, divisor)


# ---- what is chosen where nobody asks for a number


def choose_about(rows: Rows, k: np.ndarray, share: float, least: float, most: float, offset: int) -> Chosen:
    """`selection.sampled_top` of all rows; k is [R]."""
    n = rows.table[:-1, N]
    exact = (k < 2 * EXPECTED) | (share > 0.5)
    sizes = [math.ceil(max(share * size, EXPECTED * size / max(some, 1))) for size, some in zip(n, k, strict=True)]
    stride = np.array([stride_of(int(size), some) for size, some in zip(n, sizes, strict=True)], np.int64)
    first = offset % stride
    sampled = -(-(n - first) // stride)
    rank = np.maximum(1, np.rint(k * sampled / np.maximum(n, 1))).astype(np.int64)
    smallest_sent = key(float(np.finfo(rows.dtype).tiny), rows.dtype)
    chosen, pending, largest = Chosen(rows), ~exact, exact.copy()
    while True:  # once in any case, so that small tensors, too, have all kernels compiled
        threshold = np.maximum(sampled_keys(rows, np.where(pending, rank, 0), first, stride), smallest_sent)
        choose_from(rows, np.where(pending, threshold, -1), chosen)
        pending &= (chosen.kept < least * k) & (threshold > smallest_sent)
        largest |= pending & (rank == sampled)  # the sample has missed the large ones altogether
        pending &= ~largest
        lower = np.ceil(rank * k / np.maximum(chosen.kept, 1)).astype(np.int64)
        rank = np.where(pending, np.minimum(sampled, np.maximum(rank + 1, lower)), rank)
        if not pending.any():
            break
    largest |= chosen.kept > most * k
    choose_largest(rows, np.where(largest, k, -1), chosen)
    leave_zeros(rows, chosen, exact)
    return chosen


def choose_above(rows: Rows, threshold: float, most: np.ndarray) -> Chosen:
    """All magnitudes from a threshold on, of each row at most the `most` [R] largest."""
    chosen = Chosen(rows)
    choose_from(rows, np.full(rows.count, key(threshold, rows.dtype)), chosen)
    return choose_largest(rows, np.where(chosen.kept > most, most, -1), chosen)


def choose_nonzero(rows: Rows) -> Chosen:
    """All coordinates that are not zero."""
    chosen = Chosen(rows)
    choose_from(rows, np.ones(rows.count, np.int64), chosen)
    return chosen


def refuse_non_finite(bad: np.ndarray) -> None:
    """Raise NonFiniteRow for the first row of which a value has no code."""
    if bad.any():
        raise NonFiniteRow(int(bad.argmax()))
