"""gTopK: sparse sums along a tree, in which every pair of workers keeps the largest entries.

Tensor suffixes: W local workers, R rows, N coordinates, B bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, NonFiniteRow, Target
from accordion_bench.codecs.layout import Message, Transfer
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Context, Exchanged, Kept, State, paying_levels, subtract_
from accordion_bench.compressors.description import WhyDense, shorter_messages
from accordion_bench.compressors.gathered import non_finite, target_like
from accordion_bench.compressors.probe import cheaper_than_dense, probe_exchanged
from accordion_bench.compressors.sparse import Sparse
from accordion_bench.compressors.wrapper import Wrapper
from accordion_bench.options.units import counted
from accordion_bench.plan import TensorSpec


class Merge(NamedTuple):
    """Result of one round of merges on the local workers.

    ours, theirs: the messages [R, B] that were added.
    kept: the message of the sum's largest entries, [R, B].
    keepers: the local workers that keep the dropped part of the sum, each with its row of the messages.
    """

    ours: Tensor
    theirs: Tensor
    kept: Tensor
    keepers: list[tuple[int, int]]


def rounds(workers: int) -> list[list[int | None]]:
    """Return the receiver of each worker's message in each round; None = it sends nothing.

    With 2^d the largest power of two that is at most A, workers from 2^d on first send to w - 2^d. Then w exchanges
    with w xor 2^j, j = 0 to d - 1. Then the workers from 2^d on receive the result.
    """
    d = workers.bit_length() - 1
    core, others = 1 << d, workers - (1 << d)
    into: list[list[int | None]] = [[None] * core + list(range(others))] if others else []
    back: list[list[int | None]] = [[core + w if w < others else None for w in range(workers)]] if others else []
    met: list[list[int | None]] = [[w ^ (1 << j) if w < core else None for w in range(workers)] for j in range(d)]
    return [*into, *met, *back]


def _why_dense(compressor: "Tree", spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
    if not compressor.compresses(spec, level) or compressor.pays(spec, level, workers):
        return None
    reason = f"messages of {counted(workers, 'worker')} along a tree would cost more than a dense all-reduce"
    return WhyDense(reason, shorter_messages(compressor))


class Tree(Wrapper):
    """m_w = TopK(x_w);  log2 A rounds: two workers exchange m, both keep TopK of the sum;  update = m / A.

    All workers end with the same entries, at most k, in log2 A messages each. In the paper one worker of a pair sends,
    and the result is broadcast along the tree; here both send and merge, with the same result in half as many rounds.
    If A is not a power of two, see `rounds`.

    Worker w's contribution consists of its selected entries at the coordinates of the result; everything else is added
    to its residual. If a pair drops a sum at a coordinate that the result contains through another pair, the lowest
    worker below that pair keeps the sum in its residual. Hence the update is the mean of all contributions.

    Args:
        inner: `TopK` of whole tensors. Ties are resolved in favour of the lower index, so that all replicas agree.

    Source: Shi et al. 2019 (arXiv 1901.04359), where such sums are lost.
    """

    description = replace(Wrapper.description, why_dense=_why_dense, probe_input=probe_exchanged)
    inner: Sparse

    def __post_init__(self) -> None:
        super().__post_init__()
        self.traits = replace(self.inner.traits, replays=False)  # point-to-point messages are not captured

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        sent = sum(target is not None for targets_A in rounds(workers) for target in targets_A)
        return [Transfer("send_receive", self.inner.message_bytes(spec, level) * sent / workers)]

    pays = cheaper_than_dense

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        levels = paying_levels(self, ctx, comm.workers)
        ids, update = list(levels), [*xs_W]
        dense = [i for i in range(len(xs_W)) if i not in levels]
        for i, mean in zip(dense, comm.all_reduce_mean([xs_W[i] for i in dense]), strict=True):
            update[i] = mean
        if not ids:
            return Exchanged(update, lambda targets_W: subtract_(targets_W, xs_W))
        exchange = TreeExchange(self.inner, Bucket.of(xs_W, ctx, ids, comm.local), comm)
        target = target_like([xs_W[i][0] for i in ids], self.inner.takes_empty, divisor=comm.workers)
        exchange.add(target, exchange.result[:1])
        for i, mean in zip(ids, target.rows_R, strict=True):
            update[i] = mean.view(xs_W[i][0].shape)
        sent = [update[i].view(-1) != 0 for i in ids]
        if self.traits.reduces == "sum":
            for i in ids:
                update[i] = update[i] * comm.workers

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            subtract_({i: target_W for i, target_W in targets_W.items() if i not in levels}, xs_W)
            ks = [k for k, i in enumerate(ids) if i in targets_W]
            for k, part_W in zip(ks, exchange.contributions(ks), strict=True):
                targets_W[ids[k]].view(len(part_W), -1).sub_(part_W.mul_(sent[k]))

        return Exchanged(update, subtract_sent_)


class TreeExchange:
    """One exchange of a bucket along the tree.

    Attributes:
        result: the message of the largest entries of all workers' sum, [W, B], the same on all workers.

    Raises:
        NonFinite: a tensor of a local worker, or a sum, is not finite.
    """

    def __init__(self, codec: Sparse, bucket: Bucket, comm: Comm) -> None:
        self.codec, self.bucket, self.comm = codec, bucket, comm
        self.layout = codec.layout(bucket.specs, bucket.levels)
        self.own = self.result = self._encoded(bucket)
        self.merges: list[Merge] = []
        d = comm.workers.bit_length() - 1
        uneven = comm.workers > 1 << d
        for number, targets_A in enumerate(rounds(comm.workers)):
            theirs_W = comm.send_receive(self.result, targets_A)
            rows = [row for row, worker in enumerate(comm.local) if worker in targets_A]
            if not rows:
                continue
            news = _picked(theirs_W, rows)
            if number < d + uneven:  # in the last round of an uneven tree the result is returned
                alike = 1 if uneven and number == 0 else 2 << (number - uneven)  # workers that compute the same sum
                keepers = [(row, r) for r, row in enumerate(rows) if (comm.first_worker + row) % alike == 0]
                ours, theirs = _picked(self.result, rows), news
                news = self._largest(ours, theirs, rows)
                self.merges.append(Merge(ours, theirs, news, keepers))
            self.result = self.result.clone()
            for row, message in zip(rows, news, strict=True):
                self.result[row] = message

    def contributions(self, ks: Sequence[int]) -> list[Tensor]:
        """Return the local workers' selected entries of some tensors, minus the sums that they keep, [W, N] each."""
        if not ks:
            return []
        target = target_like([self.bucket.xs_W[k] for k in ks], False, rows=len(self.own))
        parts_W = list(target.rows_R)
        self.add(target, self.own, ks)
        for merge in self.merges:
            for row, r in merge.keepers:
                of_row = [part_W[row : row + 1] for part_W in parts_W]
                for rows, alpha in ((merge.ours, -1.0), (merge.theirs, -1.0), (merge.kept, 1.0)):
                    self.add(Target(of_row, alpha), rows[r : r + 1], ks)
        return parts_W

    def add(self, target: Target, rows: Tensor, ks: Sequence[int] | None = None) -> None:
        """Add decoded messages [R, B] of some tensors to a target; None = of all tensors."""
        message = Message(rows, [self.layout] * len(rows))
        if ks is None:
            self.codec.add_bucket_(target, message, self.bucket)
        elif ks:
            self.codec.add_bucket_(target, message.take(ks), self.bucket.take(ks))

    def _largest(self, ours: Tensor, theirs: Tensor, rows: Sequence[int]) -> Tensor:
        """Return messages of the largest entries of the sums of messages [R, B] on some local workers."""
        target = target_like([_picked(x_W, rows) for x_W in self.bucket.xs_W], False, rows=len(rows))
        for messages in (ours, theirs):
            self.add(target, messages)
        return self._encoded(
            replace(self.bucket, xs_W=list(target.rows_R), workers=[self.bucket.workers[row] for row in rows])
        )

    def _encoded(self, bucket: Bucket) -> Tensor:
        try:
            return self.codec.encode_bucket(bucket).rows
        except NonFiniteRow as bad:
            row, k = divmod(bad.row, len(bucket.specs))
            named = self.comm.first_named - self.comm.first_worker + bucket.workers[row]
            raise non_finite(bucket, k, named) from None


def _picked(x_W: Tensor, rows: Sequence[int]) -> Tensor:
    return torch.stack([x_W[row] for row in rows])
