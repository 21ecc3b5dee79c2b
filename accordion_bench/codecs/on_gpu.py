"""Engine of a GPU by Triton kernels; by torch for tensors and tiles that are too large for them.

This module requires Triton; `engines` imports it if Triton is installed.

Tensor suffixes: W local workers, R rows of a target.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Target
from accordion_bench.codecs.coding import BlockNumbers, Coding
from accordion_bench.codecs.compiled import Compiled, measurable, table_of, values_of
from accordion_bench.codecs.engine import Momenta, MomentumSteps, Sampling, Selection
from accordion_bench.codecs.layout import KEPT, Layout, Message, SparseLayout
from accordion_bench.codecs.low_rank_on_gpu import LowRankOnGpu
from accordion_bench.codecs.matrix_tiles import BINS, TileForm, quantised
from accordion_bench.codecs.packed_codes import pack_codes
from accordion_bench.codecs.selection import EXPECTED, stride_of
from accordion_bench.tensors.kernels.dense_kernels import BlockRule, Encoding
from accordion_bench.tensors.kernels.on_gpu import (
    bins,
    dense_kernels,
    norms,
    selection,
    sparse,
    steps,
    thresholds,
    tiles,
)
from accordion_bench.tensors.kernels.on_gpu.selection import Entries
from accordion_bench.tensors.kernels.on_gpu.sparse import Sections
from accordion_bench.tensors.kernels.on_gpu.thresholds import ReachedEntries, WantedEntries
from accordion_bench.tensors.kernels.table import addresses, contiguous
from accordion_bench.tensors.upload import upload

LONGEST = 1 << 30  # largest number of coordinates of a tensor that kernels support


class FixedSelection(selection.Entries):
    """Selection of a fixed number of entries."""

    @property
    def counts_W(self) -> Tensor:
        """See `Selection`."""
        raise NotImplementedError("the numbers of entries are those of the call")


class OnGpu(Compiled, LowRankOnGpu):
    """Engine of a GPU. For small blocks, one kernel reads the coordinates and writes scales and codes."""

    name = "triton"

    def __init__(self) -> None:
        super().__init__(dense_kernels)

    def encode_dense(self, bucket: Bucket, message: Message, coding: Coding, shared: Tensor | None = None) -> None:
        if bucket.feedback is not None and not bucket.feedback.fits_kernels(bucket.rows_W, shared):
            super().encode_dense(bucket, message, coding, shared)
            return
        if measurable(message.layout, coding):
            encoding = self.encoding(bucket, message, coding, BlockNumbers())._replace(measured=coding.rule)
            self.encode_by(encoding, bucket, message, coding)
        else:
            self.encode_formed(bucket, message, coding, shared)

    def numbers(self, bucket: Bucket, layout: Layout, rule: BlockRule) -> list[Tensor]:
        return norms.block_numbers(bucket.coordinates, table_of(layout), rule)

    def factors(self, rule: BlockRule, scales: Tensor) -> Tensor:
        return norms.factors(scales, rule)

    def encode_by(self, encoding: Encoding, bucket: Bucket, message: Message, coding: Coding) -> None:
        if bucket.feedback is not None:
            encoding = encoding._replace(values=values_of(coding))
        super().encode_by(encoding, bucket, message, coding)

    def largest(self, rows_W: Sequence[Tensor], counts: Sequence[int]) -> Selection:
        if longest(rows_W) > LONGEST:
            return super().largest(rows_W, counts)
        return FixedSelection(*_largest([contiguous(x_W) for x_W in rows_W], counts))

    def above(self, rows_W: Sequence[Tensor], threshold: float, most: Sequence[int]) -> Selection:
        if longest(rows_W) > LONGEST:
            return super().above(rows_W, threshold, most)
        bits = int(np.float32(threshold).view(np.int32))
        return _from_thresholds(rows_W, [WantedEntries(k, k, bits) for k in most])

    def about(self, rows_W: Sequence[Tensor], counts: Sequence[int], sampling: Sampling) -> Selection:
        if longest(rows_W) > LONGEST:
            return super().about(rows_W, counts, sampling)
        return _from_thresholds(
            rows_W, [_about(x_W.shape[1], k, sampling) for x_W, k in zip(rows_W, counts, strict=True)]
        )

    def nonzero(self, rows_W: Sequence[Tensor]) -> Selection:
        if longest(rows_W) > LONGEST:
            return super().nonzero(rows_W)
        own_W = [contiguous(x_W) for x_W in rows_W]
        return thresholds.not_zero(own_W, addresses(own_W))

    def encode_sparse(self, bucket: Bucket, selection: Selection, message: Message) -> None:
        if isinstance(selection, FixedSelection):
            own = sections_of(message.layout)
            sparse.write_entries(selection, sparse.tables_on(own, message.rows.device), message.rows)
        elif isinstance(selection, ReachedEntries):
            self._encode_from_keys(bucket, selection, message)
        else:
            super().encode_sparse(bucket, selection, message)

    def _encode_from_keys(self, bucket: Bucket, selection: ReachedEntries, message: Message) -> None:
        most = max(int(layout.kept.sum()) for layout in message.layouts)
        own = _sections_of_each(message, most)
        row, there = message.rows[0][None], message.rows[0].device
        on = sparse.Tables.of(own, there, upload)
        indices, values = thresholds.entries_of(selection, most)
        sparse.write_entries(Entries(indices.view(1, -1), values.view(1, -1)), on, row)
        if own.signs:
            sparse.write_heads(self.largest_of(bucket).flatten(), on, row)

    def add_sparse(self, target: Target, message: Message) -> None:
        if longest(target.rows_R) > LONGEST:
            super().add_sparse(target, message)
            return
        target, rows = target.begun(), message.rows
        to, like, alpha = addresses(target.rows_R), target.rows_R[0], math.nan if target.clears else target.alpha
        if isinstance(rows, Tensor) and not message.layout.signs:
            own = sections_of(message.layout)
            sparse.add_entries(to, sparse.tables_on(own, like.device), rows, alpha, like)
        elif len(rows):
            own = _sections_of_each(message)
            on = sparse.Tables.of(own, like.device, upload)
            sparse.add_entries(to, on, rows[0][None], alpha, like, senders=len(rows))
        if target.divisor != 1:
            torch._foreach_div_(list(target.rows_R), target.divisor)

    def select_in_bins(
        self, residuals_W: Sequence[Tensor], news_W: Sequence[Tensor], sizes: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        if max(sizes) > bins.WIDEST:
            return super().select_in_bins(residuals_W, news_W, sizes)
        return bins.send_lifted(residuals_W, news_W, sizes)

    def add_momenta(self, momenta: Momenta) -> Sequence[Tensor]:
        if momenta.us_W[0].dtype != torch.float32:
            return super().add_momenta(momenta)
        return steps.add(*momenta)

    def momentum_steps(self, given: MomentumSteps) -> list[Tensor]:
        if given.momenta[0].dtype != torch.float32:
            return super().momentum_steps(given)
        return steps.take(given.momenta, given.sums, given.inverses, given.rates)

    def encode_tiles(self, bucket: Bucket, message: Message, forms: Sequence[TileForm]) -> None:
        own = tiles_of(message.layout, tuple(forms))
        if own is None:
            super().encode_tiles(bucket, message, forms)
            return
        (shapes, sections), there = own, message.rows.device
        rows_W = [contiguous(x_W) for x_W in bucket.rows_W]
        found = tiles.largest(addresses(rows_W), tiles.tables_on(shapes, there), rows_W[0])
        sparse.write_entries(found, sparse.tables_on(sections, there), message.rows)
        fields, parts_W = message.layout.fields, found.values.split([form.kept for form in forms], dim=1)
        for t, (values_W, form) in enumerate(zip(parts_W, forms, strict=True)):
            if form.coded:
                codes_W, table_W = quantised(values_W)
                for name, part_W in (("numbers", table_W.view(torch.uint8)), ("codes", pack_codes(codes_W, BINS))):
                    start, stop = fields[name].spans[t]
                    message.rows[:, start:stop] = part_W

    def add_tiles(self, target: Target, message: Message, forms: Sequence[TileForm]) -> None:
        own = tiles_of(message.layout, tuple(forms))
        if own is None:
            super().add_tiles(target, message, forms)
            return
        target, like = target.begun(), target.rows_R[0]
        on = tiles.tables_on(own[0], like.device)
        tiles.add(addresses(target.rows_R), on, message.rows, target.alpha, like)
        if target.divisor != 1:
            torch._foreach_div_(list(target.rows_R), target.divisor)


def longest(rows_R: Sequence[Tensor]) -> int:
    """Return the number of coordinates of the longest tensor."""
    return max(x_R.shape[1] for x_R in rows_R)


def _largest(rows_W: Sequence[Tensor], counts: Sequence[int]) -> Entries:
    numels = tuple(x_W.shape[1] for x_W in rows_W)
    return selection.largest(addresses(rows_W), numels, tuple(counts), rows_W[0])


def _from_thresholds(rows_W: Sequence[Tensor], wanted: Sequence[WantedEntries]) -> ReachedEntries:
    own_W = [contiguous(x_W) for x_W in rows_W]
    counts = [some.listed(x_W.shape[1]) for x_W, some in zip(own_W, wanted, strict=True)]
    return thresholds.from_thresholds(_largest(own_W, counts), addresses(own_W), wanted, counts, own_W[0])


def _about(n: int, k: int, sampling: Sampling) -> WantedEntries:
    """Return the parameters of a selection of about k of n entries, see `selection.sampled_top`."""
    if sampling.share > 0.5 or k < 2 * EXPECTED:
        return WantedEntries(k, k, bits=1)  # all but zeros
    stride = stride_of(n, math.ceil(max(sampling.share * n, EXPECTED * n / k)))
    sample = range(sampling.offset % stride, n, stride)
    rank = max(1, round(k * len(sample) / n))
    return WantedEntries(k, math.floor(sampling.most * k), 0, math.ceil(sampling.least * k), sample, rank)


def _sections_of_each(message: Message, stride: int | None = None) -> Sections:
    """Return the sections of all senders' entries, with offsets relative to the first sender's message.

    Args:
        message: messages of senders with different layouts.
        stride: distance between the first entries of two senders in the buffer of entries; None = contiguous.
    """
    layouts: Sequence[SparseLayout] = message.layouts
    signs, at = layouts[0].signs, [row.data_ptr() - message.rows[0].data_ptr() for row in message.rows]
    heads, codes = (
        np.concatenate([layout.fields[name].offsets + first for layout, first in zip(layouts, at, strict=True)])
        for name in ("scales" if signs else "values", "indices")
    )
    kept = np.stack([layout.kept for layout in layouts])
    first = kept.cumsum(1) - kept + np.arange(len(layouts))[:, None] * (stride or 0)
    shapes = tuple(np.concatenate(columns) for columns in zip(*(layout.codes for layout in layouts), strict=True))
    numels = np.concatenate([layout.numels for layout in layouts])
    return Sections(numels, kept.ravel(), (heads, codes), shapes, signs, first.ravel())


@functools.lru_cache(maxsize=4 * KEPT)
def sections_of(layout: SparseLayout) -> Sections:
    """Return the sections of a layout for kernels; cached."""
    values, codes = layout.fields["values"].offsets, layout.fields["indices"].offsets
    return Sections(layout.numels, layout.kept, (values, codes), layout.codes)


@functools.lru_cache(maxsize=4 * KEPT)
def tiles_of(layout: Layout, forms: tuple[TileForm, ...]) -> tuple[tuple[tiles.TileShape, ...], Sections] | None:
    """Return the tiles of a layout, and the sections of their entries; None if kernels do not support them; cached."""
    at = [layout.fields[name].offsets.tolist() for name in ("numbers", "indices", "codes")]
    shapes = tuple(
        tiles.TileShape(n, form.tiles.m, form.tiles.a, form.tiles.b, form.k, form.width, form.coded, *begins)
        for n, form, *begins in zip(layout.numels.tolist(), forms, *at, strict=True)
    )
    if any(one.room[0] > tiles.WIDEST or one.numel > LONGEST // max(1, one.width) for one in shapes):
        return None
    heads = np.array([-1 if one.coded else one.numbers for one in shapes], np.int64)
    widths, kept = (np.array(column, np.int64) for column in ([one.width for one in shapes], [f.kept for f in forms]))
    codes = (0 * widths, widths, -(-kept * widths // 8), 0 * widths)
    return shapes, Sections(layout.numels, kept, (heads, layout.fields["indices"].offsets), codes)
