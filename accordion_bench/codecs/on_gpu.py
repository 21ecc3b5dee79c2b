"""The engine of a GPU: Triton's kernels for dense codes, thin factors, largest and drawn entries; else torch.

This module needs Triton; `engines` imports it where Triton is installed.

Tensor suffixes: W local workers, R rows of a target.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.codecs.block_numbers import BlockNumbers
from accordion_bench.codecs.bucket import Bucket, Target
from accordion_bench.codecs.coding import Coding
from accordion_bench.codecs.compiled import Compiled, measurable, table_of, values_of
from accordion_bench.codecs.device_selection import POSITIONS, Part, magnitude_bits
from accordion_bench.codecs.engine import Selection
from accordion_bench.codecs.layout import KEPT, Layout, Message, SparseLayout
from accordion_bench.codecs.low_rank_on_gpu import LowRankOnGpu
from accordion_bench.tensors.kernels.dense_kernels import BlockRule, Encoding
from accordion_bench.tensors.kernels.on_gpu import block_numbers, dense_kernels, norms, selection, sparse
from accordion_bench.tensors.kernels.on_gpu.sparse import Sections
from accordion_bench.tensors.kernels.table import addresses, contiguous
from accordion_bench.tensors.upload import upload

LONGEST = 1 << 30  # coordinates of a tensor that kernels take


class Picked(selection.Entries):
    """A selection of so many entries, known to who has asked."""

    @property
    def counts_W(self) -> Tensor:
        """See `Selection`."""
        raise NotImplementedError("entries are as many as were asked for")


class OnGpu(Compiled, LowRankOnGpu):
    """Triton's kernels where there are any. Of small blocks, scales and codes are made in one read of coordinates."""

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
        return block_numbers.factors(scales, rule)

    def encode_by(self, encoding: Encoding, bucket: Bucket, message: Message, coding: Coding) -> None:
        if bucket.feedback is not None:
            encoding = encoding._replace(values=values_of(coding))
        super().encode_by(encoding, bucket, message, coding)

    def largest(self, rows_W: Sequence[Tensor], counts: Sequence[int]) -> Selection:
        numels = tuple(x_W.shape[1] for x_W in rows_W)
        if max(numels) > LONGEST:
            return super().largest(rows_W, counts)
        rows_W = [contiguous(x_W) for x_W in rows_W]
        return Picked(*selection.largest(addresses(rows_W), numels, tuple(counts), rows_W[0]))

    def in_order(self, x_W: Tensor, parts: Sequence[Part]) -> Tensor:
        sections = [(part.start + g * part.size, part.size, part.kept) for part in parts for g in range(part.sections)]
        starts, sizes, kept = zip(*sections, strict=True)
        if max(sizes) > LONGEST:
            return super().in_order(x_W, parts)
        own_W = [x_W[:, start : start + size] for start, size in zip(starts, sizes, strict=True)]
        found = selection.largest(addresses(own_W), sizes, kept, x_W)
        ends, firsts = upload(torch.tensor([kept, starts]), x_W.device).unbind(0)
        entry = torch.arange(found.indices.shape[1], device=x_W.device)
        section = torch.searchsorted(ends.cumsum(0), entry, right=True)
        last_W = POSITIONS - firsts.index_select(0, section) - found.indices
        keys_W = (magnitude_bits(found.values) << 32).add_(last_W)
        cut, lists = keys_W.split([part.sections * part.kept for part in parts], dim=1), [keys_W[:, :0]]
        for own_W, part in zip(cut, parts, strict=True):
            if part.kept:
                own_W = own_W.unflatten(1, (part.sections, part.kept))
                lists.append(own_W.sort(dim=2, descending=True).values.flatten(1))
        return torch.cat(lists, dim=1)

    def encode_sparse(self, bucket: Bucket, selection: Selection, message: Message) -> None:
        if not isinstance(selection, Picked):
            super().encode_sparse(bucket, selection, message)
        else:
            sparse.write_entries(selection, sections_of(message.layout), message.rows)

    def add_sparse(self, target: Target, message: Message) -> None:
        layout = message.layout
        if layout.signs or not isinstance(message.rows, Tensor) or layout.numels.max() > LONGEST:
            super().add_sparse(target, message)
            return
        target = target.begun()
        like = target.rows_R[0]
        sparse.add_entries(addresses(target.rows_R), sections_of(layout), message.rows, target.alpha, like)
        if target.divisor != 1:
            torch._foreach_div_(list(target.rows_R), target.divisor)


@functools.lru_cache(maxsize=4 * KEPT)
def sections_of(layout: SparseLayout) -> Sections:
    """Where entries of a layout are, as kernels are told; remembered."""
    values, codes = layout.fields["values"].offsets, layout.fields["indices"].offsets
    return Sections(layout.numels, layout.kept, values, codes, layout.codes)
