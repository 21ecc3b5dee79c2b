"""Engine of a CPU: loops compiled by numba.

This module requires numba; `engines` imports it if numba is installed.

Tensor suffixes: W local workers, R rows, S senders, T tensors, N elements.
"""

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, NonFiniteRow, Target
from accordion_bench.codecs.compiled import Compiled
from accordion_bench.codecs.engine import Sampling, Selection
from accordion_bench.codecs.layout import Message, SparseLayout
from accordion_bench.codecs.matrix_tiles import BINS, SIGMAS, TileForm
from accordion_bench.codecs.selection import EXPECTED, stride_of
from accordion_bench.tensors.kernels import on_cpu
from accordion_bench.tensors.kernels.bins import send_lifted
from accordion_bench.tensors.kernels.index_codes import add_entries, messages, write_entries
from accordion_bench.tensors.kernels.table import contiguous
from accordion_bench.tensors.kernels.tiles import add_tiles, encode_tiles
from accordion_bench.tensors.kernels.top import ChosenKeys, N, Rows, choose_by_key, choose_largest, key, sampled_keys

HEADER = 8  # bytes of scale and count in messages of signs


class OnCpu(Compiled):
    """Engine of a CPU: compiled loops over all tensors of a bucket."""

    name = "numba"

    def __init__(self) -> None:
        super().__init__(on_cpu)

    def largest(self, rows_W: Sequence[Tensor], counts: Sequence[int]) -> Selection:
        return choose_largest(_rows(rows_W), np.tile(counts, len(rows_W[0])))

    def above(self, rows_W: Sequence[Tensor], threshold: float, most: Sequence[int]) -> Selection:
        rows = _rows(rows_W)
        chosen, enough = ChosenKeys(rows), np.tile(most, rows.workers)
        choose_by_key(chosen, np.full(rows.count, key(threshold, rows.dtype)))
        return choose_largest(rows, np.where(chosen.kept > enough, enough, -1), chosen)

    def about(self, rows_W: Sequence[Tensor], counts: Sequence[int], sampling: Sampling) -> Selection:
        return choose_about(_rows(rows_W), np.tile(counts, len(rows_W[0])), sampling)

    def nonzero(self, rows_W: Sequence[Tensor]) -> Selection:
        chosen = ChosenKeys(_rows(rows_W))
        choose_by_key(chosen, np.ones(chosen.rows.count, np.int64))
        return chosen

    def encode_sparse(self, bucket: Bucket, selection: Selection, message: Message) -> None:
        assert isinstance(selection, ChosenKeys)
        bad = write_entries(selection, _table(message))
        if not message.layout.signs:
            if bad.any():
                raise NonFiniteRow(int(bad.argmax()))
            return
        scales_W, counts_W = self.largest_of(bucket).numpy(), selection.counts_W.numpy()
        for out, layout, scales, counts in zip(message.rows, message.layouts, scales_W, counts_W, strict=True):
            header = np.stack([scales.view(np.int32), counts], axis=1).view(np.uint8)
            out.numpy()[np.array(layout.starts)[:, None] + np.arange(HEADER)] = header

    def add_sparse(self, target: Target, message: Message) -> None:
        target = target.begun()
        tensors, rows = len(target.rows_R), len(target.rows_R[0])
        senders = np.arange(len(message.rows)).reshape(-1, rows)  # [S / R, R]
        order = (senders.T[:, None, :] * tensors + np.arange(tensors)[:, None]).ravel()  # by row, tensor, sender
        until = len(senders) * np.arange(rows * tensors + 1)
        alpha = math.nan if target.clears else target.alpha
        add_entries(Rows(target.rows_R), _table(message)[order], until, alpha, target.divisor)

    def select_in_bins(
        self, residuals_W: Sequence[Tensor], news_W: Sequence[Tensor], sizes: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        return send_lifted(residuals_W, [contiguous(x_W) for x_W in news_W], sizes)

    def encode_tiles(self, bucket: Bucket, message: Message, forms: Sequence[TileForm]) -> None:
        rows_W, starts = [contiguous(x_W) for x_W in bucket.rows_W], message.layout.starts
        bad = encode_tiles(message.rows, starts, rows_W, _shapes(rows_W, forms), SIGMAS / BINS)
        if bad.any():
            raise NonFiniteRow(int(bad.argmax()))

    def add_tiles(self, target: Target, message: Message, forms: Sequence[TileForm]) -> None:
        target = target.begun()
        shapes = _shapes(target.rows_R, forms)
        add_tiles(target.rows_R, message.rows, message.layout.starts, shapes, target.alpha, target.divisor)


def _shapes(rows_R: Sequence[Tensor], forms: Sequence[TileForm]) -> list[tuple[int, ...]]:
    """Return the columns `kernels.tiles.SHAPE` of each tensor."""
    return [
        (x_R.shape[1], form.tiles.m, form.tiles.a, form.tiles.b, form.k, form.width, form.coded)
        for x_R, form in zip(rows_R, forms, strict=True)
    ]


def _rows(rows_W: Sequence[Tensor]) -> Rows:
    return Rows([contiguous(x_W) for x_W in rows_W])


def _table(message: Message) -> np.ndarray:
    """Return the table of values and index codes, one row per sender and tensor."""
    layouts: Sequence[SparseLayout] = message.layouts
    signs = layouts[0].signs
    first = "scales" if signs else "values"
    at = [row.data_ptr() + layout.fields[first].offsets for row, layout in zip(message.rows, layouts, strict=True)]
    kept = np.concatenate([layout.kept for layout in layouts])
    codes = [np.concatenate(columns) for columns in zip(*(layout.codes for layout in layouts), strict=True)]
    return messages(np.stack(at), kept, codes, HEADER if signs else None)


def choose_about(rows: Rows, k: np.ndarray, sampling: Sampling) -> ChosenKeys:
    """Return `selection.sampled_top` of all rows; k is [R]."""
    n = rows.table[:-1, N]
    exact = (k < 2 * EXPECTED) | (sampling.share > 0.5)
    sizes = [
        math.ceil(max(sampling.share * size, EXPECTED * size / max(some, 1))) for size, some in zip(n, k, strict=True)
    ]
    stride = np.array([stride_of(int(size), some) for size, some in zip(n, sizes, strict=True)], np.int64)
    first = sampling.offset % stride
    sampled = -(-(n - first) // stride)
    rank = np.maximum(1, np.rint(k * sampled / np.maximum(n, 1))).astype(np.int64)
    smallest_sent = key(float(np.finfo(rows.dtype).tiny), rows.dtype)
    chosen, pending, largest = ChosenKeys(rows), ~exact, exact.copy()
    while True:  # at least once, so that small tensors also compile all kernels
        threshold = np.maximum(sampled_keys(rows, np.where(pending, rank, 0), first, stride), smallest_sent)
        choose_by_key(chosen, np.where(pending, threshold, -1))
        pending &= (chosen.kept < sampling.least * k) & (threshold > smallest_sent)
        largest |= pending & (rank == sampled)  # the sample contains none of the large entries
        pending &= ~largest
        lower = np.ceil(rank * k / np.maximum(chosen.kept, 1)).astype(np.int64)
        rank = np.where(pending, np.minimum(sampled, np.maximum(rank + 1, lower)), rank)
        if not pending.any():
            break
    largest |= chosen.kept > sampling.most * k
    choose_largest(rows, np.where(largest, k, -1), chosen)
    choose_by_key(chosen, np.where(exact & (chosen.least == 0) & (chosen.kept > 0), 1, -1))  # no zeros
    return chosen
