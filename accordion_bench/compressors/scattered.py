"""Scattered: compressed reduce-scatter by one all-to-all, in which each worker receives the tensors that it owns.

Tensor suffixes: W local workers, A all workers, N elements.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Target
from accordion_bench.codecs.layout import Transfer
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Context, Exchanged, Kept, State, paying_levels, subtract_
from accordion_bench.compressors.gathered import Gathered, average_at_owners, naming
from accordion_bench.compressors.probe import dense_bytes
from accordion_bench.compressors.wrapper import Wrapper
from accordion_bench.options.option import with_options
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.same_shape import in_rows


@with_options
class Scattered(Wrapper):
    """Update of a tensor = mean_w C(x_w), for its owner only: owners decode all messages and sum them in float32.

    This is the first half of `TwoWay`, with tensors instead of pieces. Tensors without a level, or without a shorter
    message, are sent uncompressed. On workers that do not own a tensor, the update is their own input and is unused.

    Args:
        inner: encodes the messages; if its messages do not encode single tensors, all tensors are sent uncompressed.
        owners: index of the worker that owns a tensor, by name.
    """

    owners: Mapping[str, int]

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        assert isinstance(self.inner, Gathered)
        return [Transfer("all_to_all", self.inner.message_bytes(spec, level))]

    def pays(self, spec: TensorSpec, level: float, workers: int) -> bool:
        return sum(transfer.nbytes for transfer in self.transfers(spec, level, workers)) < dense_bytes(spec)

    def takes_feedback(self, spec: TensorSpec, level: float | None, workers: int) -> bool:
        return level is not None and self.inner.takes_feedback(spec, level, workers) and self.pays(spec, level, workers)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        owned = [[i for i, spec in enumerate(ctx.specs) if self.owners[spec.name] == w] for w in range(comm.workers)]
        levels = paying_levels(self, ctx, comm.workers)
        coded = [[i for i in own if i in levels] for own in owned]
        ids = [i for own in coded for i in own]
        whole = [[i for i in own if i not in levels] for own in owned]
        update = [x_W[0] for x_W in xs_W]
        bucket = Bucket.of(xs_W, ctx, ids, comm.local)
        if ids:
            assert isinstance(self.inner, Gathered)
            with naming(ctx, ids, comm.first_named):
                handed = average_at_owners(self.inner, bucket, list(map(len, coded)), comm)
            for owner, means in zip(comm.local, handed.means_W, strict=True):
                for i, mean in zip(coded[owner], means, strict=True):
                    update[i] = mean.view(ctx.specs[i].shape)
        for owner, parts in zip(comm.local, _means_of_owned(xs_W, whole, comm), strict=True):
            for i, part in zip(whole[owner], parts, strict=True):
                update[i] = part.view(ctx.specs[i].shape)

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            subtract_({i: target_W for i, target_W in targets_W.items() if i not in levels}, xs_W)
            ks = [k for k, i in enumerate(ids) if i in targets_W]
            if ks:
                assert isinstance(self.inner, Gathered)
                target = Target([in_rows(targets_W[ids[k]]) for k in ks], -1.0)
                self.inner.add_bucket_(target, handed.message.take(ks), bucket.take(ks))

        return Exchanged(update, subtract_sent_)


def _means_of_owned(xs_W: Sequence[Tensor], owned: Sequence[Sequence[int]], comm: Comm) -> list[Sequence[Tensor]]:
    """Return for each local worker the means of the tensors that it owns, [N] each, exchanged uncompressed."""
    if not any(xs_W[i].numel() for own in owned for i in own):
        return [[xs_W[i].new_empty(0) for i in owned[worker]] for worker in comm.local]
    parts_AW = [[in_rows(xs_W[i]) for i in own] for own in owned]
    none_W = xs_W[0].new_empty(comm.local_workers, 0)
    rows_AW = [torch.cat([none_W, *parts_W], dim=1) for parts_W in parts_AW]
    received = comm.all_to_all([row_W.view(torch.uint8) for row_W in rows_AW])
    means: list[Sequence[Tensor]] = []
    for worker, message_A in zip(comm.local, received, strict=True):
        sizes = [part_W.shape[1] for part_W in parts_AW[worker]]
        rows_A = message_A.reshape(-1).view(none_W.dtype).view(comm.workers, sum(sizes))
        means.append((rows_A.sum(0) / comm.workers).split(sizes))
    return means
