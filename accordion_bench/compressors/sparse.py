"""Sparse: base class of compressors that send some entries of each tensor, as values and indices.

Tensor suffixes: W local workers, A all workers, T tensors.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Target
from accordion_bench.codecs.engine import Engine, Selection
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import Layout, Message, SparseLayout, Transfer, sparse_layout
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Kept
from accordion_bench.compressors.gathered import Gathered
from accordion_bench.plan import TensorSpec

SIZE = 4  # bytes of a worker's entry count per tensor, which is sent first


class Sparse(Gathered):
    """C(v)_i = v_i for the selected entries i, else 0; the message is their values and indices.

    A subclass defines the largest number of entries (`most_entries`) and their selection (`choose`).
    """

    def most_entries(self, spec: TensorSpec, level: float) -> int:
        """Return the number of entries of a tensor that are sent, or its upper bound if it depends on the data."""
        raise NotImplementedError

    def choose(self, engine: Engine, bucket: Bucket) -> Selection:
        """Return the selection of coordinates to send."""
        raise NotImplementedError

    def layout(self, specs: Sequence[TensorSpec], levels: Sequence[float]) -> Layout:
        kept = [self.most_entries(spec, level) for spec, level in zip(specs, levels, strict=True)]
        return sparse_layout(tuple(spec.numel for spec in specs), tuple(kept))

    def encode_bucket(self, bucket: Bucket) -> Message:
        engine, layout = engine_for(bucket.rows_W), self.layout(bucket.specs, bucket.levels)
        message = Message.empty(layout, len(bucket.workers), bucket.rows_W[0].device)
        engine.encode_sparse(bucket, self.choose(engine, bucket), message)
        return message

    def add_bucket_(self, target: Target, message: Message, bucket: Bucket) -> None:
        engine_for(target.rows_R).add_sparse(target, message)


class Uneven(Sparse):
    """Base class of sparse compressors whose number of entries depends on the data: the counts are gathered first."""

    traits = replace(Gathered.traits, collectives=("all_gather",), fixed_size=False)
    signs = False  # whether all entries of a tensor have one magnitude, so that only signs are sent

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        return [Transfer("all_gather", SIZE), *super().transfers(spec, level, workers)]

    def encode_bucket(self, bucket: Bucket) -> Message:
        engine = engine_for(bucket.rows_W)
        selection = self.choose(engine, bucket)
        return self._encoded(engine, bucket, selection, selection.counts_W.tolist())

    def encode_for(self, bucket: Bucket, gathered: int, comm: Comm) -> Message:
        """Encode the local messages; on a GPU this synchronises with the host once, for the number of entries."""
        engine = engine_for(bucket.rows_W)
        selection = self.choose(engine, bucket)
        own_W, from_all = read_counts(selection.counts_W, gathered, comm)
        coming = [SparseLayout(bucket.numels[:gathered], counts, self.signs) for counts in from_all]
        return self._encoded(engine, bucket, selection, own_W)._replace(coming=coming)

    def _encoded(
        self, engine: Engine, bucket: Bucket, selection: Selection, counts_W: Sequence[Sequence[int]]
    ) -> Message:
        layouts = [SparseLayout(bucket.numels, counts, self.signs) for counts in counts_W]
        message = Message.of_each(layouts, bucket.rows_W[0].device)
        engine.encode_sparse(bucket, selection, message)
        return message

    def gather(self, message: Message, bucket: Bucket, comm: Comm) -> Message:
        own = [row[: layout.nbytes] for row, layout in zip(message.rows, message.layouts, strict=True)]
        rows = comm.all_gather_uneven(own, [layout.nbytes for layout in message.coming])
        return Message(rows, message.coming)


def read_counts(counts_W: Tensor, gathered: int, comm: Comm) -> tuple[list[list[int]], list[list[int]]]:
    """Read the numbers of sent entries, int32 [W, T], on the host; those of the first `gathered` tensors are sent.

    Returns:
        counts of the local workers [W, T]; counts of all workers for the gathered tensors [A, gathered].
    """
    tensors = counts_W.shape[1]
    if not gathered:
        return counts_W.tolist(), []
    message_A = comm.all_gather(counts_W[:, :gathered].contiguous().view(torch.uint8))
    numbers = torch.cat([counts_W.flatten(), message_A.contiguous().view(torch.int32).flatten()]).tolist()
    own, from_all = numbers[: counts_W.numel()], numbers[counts_W.numel() :]
    return _rows(own, tensors), _rows(from_all, gathered)


def _rows(numbers: list[int], size: int) -> list[list[int]]:
    return [numbers[first : first + size] for first in range(0, len(numbers), size)]
