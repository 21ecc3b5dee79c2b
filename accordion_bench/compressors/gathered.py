"""Gathered: compressors whose messages are gathered, and decoded by every worker.

Tensor suffixes: W local workers, A all workers, R rows of a target, N elements, B bytes.
"""

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Target
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import Layout, Message, Transfer
from accordion_bench.codecs.non_finite import NonFiniteRow
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import (
    Compressor,
    Context,
    Exchanged,
    NonFinite,
    State,
    compressed_levels,
    remembered,
    subtract_,
)
from accordion_bench.compressors.description import WhyDense, shorter_messages
from accordion_bench.compressors.sizes import cheaper_than_dense
from accordion_bench.compressors.traits import Traits
from accordion_bench.options.units import counted
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import large_pages


def _why_dense(compressor: "Gathered", spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
    if not compressor.compresses(spec, level) or compressor.pays(spec, level, workers):
        return None
    at = f" at {compressor.traits.knob} {level:g}" if compressor.traits.knob else ""
    reason = f"messages{at} from {counted(workers, 'worker')}, gathered, would cost more than a dense all-reduce"
    two_way = ({"compressor.collective": "two_way"},) if "two_way" in compressor.traits.collectives else ()
    return WhyDense(reason, (*two_way, *shorter_messages(compressor)) or ("fewer workers",))


class Gathered(Compressor):
    """update = mean_w decode(encode(g_w)): a bucket is one message, which holds everything that a receiver needs.

    A subclass writes `layout`, `encode_bucket` and `add_bucket_`. Messages are carried by an all-gather. Where that
    would cost more wire than a dense all-reduce, what would have been decoded goes by dense all-reduce: the number of
    workers changes the bytes, never the training (up to the order of summation).
    """

    description = replace(Compressor.description, collective_reason="its messages do not add up", why_dense=_why_dense)

    traits = Traits(collectives=("all_gather", "two_way"))
    entropy: str = "none"  # how entropy_bytes counts the codes, see `entropy.coded_bytes`
    stream: str = ""  # of its random draws; a name that never changes
    takes_empty: bool = False  # whether `add_bucket_` takes targets that are empty

    # ---- what a subclass writes

    def layout(self, specs: Sequence[TensorSpec], levels: Sequence[float]) -> Layout:
        """The fields of the message of a bucket; with the largest counts where `fixed_size` is false.

        Equal arguments should give the same object, since kernels keep tables for each.
        """
        raise NotImplementedError

    def encode_bucket(self, bucket: Bucket) -> Message:
        """The messages of the local workers.

        Raises:
            NonFiniteRow: row w T + t is the tensor t of the w-th of these workers.
        """
        raise NotImplementedError

    def add_bucket_(self, target: Target, message: Message, bucket: Bucket) -> None:
        """Add what messages decode to.

        Args:
            target: rows of each tensor; sender s goes to row s mod R, in the order of the senders.
            message: of all senders.
            bucket: whose messages these are; its coordinates are not read.
        """
        raise NotImplementedError

    def encode_fed(self, bucket: Bucket) -> Message:
        """The same of tensors with residuals, which then hold what is lost."""
        formed, feedback = bucket.formed(), bucket.feedback
        message = self.encode_bucket(formed)
        if feedback is not None:
            self.add_bucket_(Target(feedback.rows_W, -1.0), message, formed)
            feedback.mask()
        return message

    def encode_for(self, bucket: Bucket, gathered: int, comm: Comm) -> Message:
        """The same in an exchange, of which the first so many tensors will be gathered."""
        return self.encode_bucket(bucket)

    def saved_bytes(self, message: Message, bucket: Bucket) -> int:
        """Bytes by which entropy coding would shorten all senders' messages, where `entropy` is offered."""
        raise NotImplementedError

    # ---- what it gets for that

    @remembered
    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        """The length of one tensor's message; the largest possible one where `fixed_size` is false."""
        return self.layout((spec,), (level,)).nbytes

    def transfers(
        self, spec: TensorSpec, level: float, workers: int, kept: Mapping[str, Any] | None = None
    ) -> Sequence[Transfer]:
        return [Transfer("all_gather", self.message_bytes(spec, level))]

    @remembered
    def pays(self, spec: TensorSpec, level: float, workers: int) -> bool:
        return cheaper_than_dense(self.transfers(spec, level, workers), spec, workers)

    def gather(self, message: Message, bucket: Bucket, comm: Comm) -> Message:
        """All workers' messages of the first tensors of a bucket, given those of the local workers.

        Args:
            message: with the fields of these tensors alone.
            bucket: these tensors.
            comm: collectives.
        """
        size = message.layout.nbytes
        rows = comm.all_gather(message.rows[:, :size]) if size else message.rows.new_empty(comm.workers, 0)
        return Message(rows, [message.layout] * comm.workers)

    def combined(self, likes: Sequence[Tensor], everyones: Message, bucket: Bucket) -> Sequence[Tensor]:
        """The update of the tensors of a bucket, which are like these: the mean of what all workers have sent."""
        target = target_like(likes, self.takes_empty, divisor=len(everyones.layouts))
        self.add_bucket_(target, everyones, bucket)
        return target.rows_R

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        compressed = compressed_levels(self, ctx)
        gathered = [i for i, level in compressed.items() if self.pays(ctx.specs[i], level, comm.workers)]
        decoded_here = [i for i in compressed if i not in gathered]  # what would have been decoded travels, dense
        sent = Sent(self, gathered, decoded_here, xs_W, ctx, comm)

        reduced = sorted(set(range(len(xs_W))) - set(gathered))
        decoded_W = dict(zip(decoded_here, sent.decoded(decoded_here), strict=True))
        dense_W, alone = [decoded_W.get(i, xs_W[i]) for i in reduced], len(decoded_W) == len(reduced)
        update: list[Tensor] = [xs_W[0]] * len(xs_W) if xs_W else []
        for i, mean in zip(reduced, comm.all_reduce_mean(dense_W, may_alias=alone), strict=True):
            update[i] = mean
        saved = 0
        if gathered:
            first = range(len(gathered))
            part = sent.bucket.take(first)
            everyones = self.gather(sent.message.take(first), part, comm)
            means = self.combined([xs_W[i][0] for i in gathered], everyones, part)
            for i, mean in zip(gathered, means, strict=True):
                update[i] = mean.view(xs_W[i][0].shape)
            if self.entropy != "none":
                saved = self.saved_bytes(everyones, part)
        if self.entropy != "none":
            comm.ledger.entropy_count(saved)

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            subtract_({i: target_W for i, target_W in targets_W.items() if i not in compressed}, xs_W)
            sent.add_own_(targets_W, -1.0)

        return Exchanged(update, subtract_sent_, functools.partial(sent.add_own_, clears=True))


class Handed(NamedTuple):
    """What has come of tensors that were handed to their owners.

    message: of the local workers, with all tensors.
    layouts: of each owner's part of a message.
    means_W: of each local worker, the means over all workers of the tensors that it owns, [1, N] each.
    """

    message: Message
    layouts: list[Layout]
    means_W: list[list[Tensor]]


def hand_to_owners(compressor: Gathered, bucket: Bucket, counts: Sequence[int], comm: Comm) -> Handed:
    """Every worker encodes all tensors; the owner of each gets it from all, and takes the mean.

    Args:
        compressor: whose messages these are.
        bucket: tensors of all owners, those of the first owner first; residuals then hold what is lost.
        counts: how many tensors each worker of the run owns.
        comm: collectives.

    Raises:
        NonFiniteRow: as `Gathered.encode_bucket`.
    """
    if not bucket.specs:
        nothing = Message(torch.empty(len(bucket.workers), 0, dtype=torch.uint8), [])
        return Handed(nothing, [compressor.layout([], []) for _ in counts], [[] for _ in bucket.workers])
    ends = list(itertools.accumulate(counts))
    owned = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    layouts = [compressor.layout([bucket.specs[k] for k in own], [bucket.levels[k] for k in own]) for own in owned]
    sent = compressor.encode_fed(bucket)
    received = comm.all_to_all(sent.rows.split([layout.nbytes for layout in layouts], dim=1))
    means_W: list[list[Tensor]] = []
    for owner, message_A in zip(comm.local, received, strict=True):
        if not owned[owner]:
            means_W.append([])
            continue
        part = bucket.take(owned[owner])
        target = target_like([row_W[0] for row_W in part.rows_W], compressor.takes_empty, divisor=comm.workers)
        compressor.add_bucket_(target, Message(message_A, [layouts[owner]] * comm.workers), part)
        means_W.append(list(target.rows_R))
    return Handed(sent, layouts, means_W)


class Sent:
    """Tensors of an exchange, and what the local workers send of them.

    Args:
        compressor: whose messages these are.
        gathered, others: indices of the tensors in the exchange whose messages are gathered, and are not.
        xs_W: all tensors [W, ...] of the exchange.
        ctx: of the exchange.
        comm: whose local workers.

    Attributes:
        place: of each tensor among them, by index.
        bucket: these tensors.
        message: what `encode_bucket` has made of them.

    Raises:
        NonFinite: naming one of them, and its worker.
    """

    def __init__(
        self,
        compressor: Gathered,
        gathered: Sequence[int],
        others: Sequence[int],
        xs_W: Sequence[Tensor],
        ctx: Context,
        comm: Comm,
    ) -> None:
        ids = [*gathered, *others]
        self.compressor, self.place = compressor, {i: k for k, i in enumerate(ids)}
        self.bucket = Bucket.of(xs_W, ctx, ids, comm.local)
        if not ids:
            return
        try:
            self.message = compressor.encode_for(self.bucket, len(gathered), comm)
        except NonFiniteRow as bad:
            worker, k = divmod(bad.row, len(ids))
            raise non_finite(ctx, ids[k], comm.first_named + worker) from None

    def decoded(self, ids: Sequence[int]) -> list[Tensor]:
        """What the local workers have sent of tensors, [W, ...]; contiguous, side by side."""
        if not ids:
            return []
        ks = [self.place[i] for i in ids]
        xs_W, part = [self.bucket.xs_W[k] for k in ks], self.bucket.take(ks)
        target = target_like(xs_W, self.compressor.takes_empty, rows=len(xs_W[0]))
        self.compressor.add_bucket_(target, self.message.take(ks), part)
        return [row_W.view(x_W.shape) for row_W, x_W in zip(target.rows_R, xs_W, strict=True)]

    def add_own_(self, targets_W: Mapping[int, Tensor], alpha: float = 1.0, clears: bool = False) -> None:
        """target [W, ...] += alpha x what the local workers have sent of it; by index, those of other tensors stay."""
        rows_W = {
            self.place[i]: target_W.view(len(target_W), -1) for i, target_W in targets_W.items() if i in self.place
        }
        if ks := sorted(rows_W):
            target = Target([rows_W[k] for k in ks], alpha, clears=clears)
            self.compressor.add_bucket_(target, self.message.take(ks), self.bucket.take(ks))


def target_like(xs: Sequence[Tensor], may_be_empty: bool, rows: int = 1, divisor: int = 1) -> Target:
    """Rows [R, N] for as many numbers as tensors have, side by side: empty, or of zeros, which cost a CPU no pass."""
    sizes, empty = [x.numel() for x in xs], may_be_empty and engine_for(xs).fills
    make = torch.empty if empty else large_pages.zeros
    parts = make(1, sum(sizes), device=xs[0].device, dtype=xs[0].dtype)[0].split(sizes)
    return Target([part.view(rows, -1) for part in parts], divisor=divisor, empty=empty)


def non_finite(ctx: Context, i: int, worker: int) -> NonFinite:
    """The error for a tensor that has no code."""
    return NonFinite(f"what worker {worker} was to send of {ctx.specs[i].name} is not finite")
