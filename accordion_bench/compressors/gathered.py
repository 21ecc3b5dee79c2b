"""Gathered: base class of compressors whose messages are gathered, and decoded by every worker.

Tensor suffixes: W local workers, A all workers, R rows of a target, N elements, B bytes.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, NonFiniteRow, Target
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import Layout, Message, Transfer
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import (
    Compressor,
    Context,
    Exchanged,
    Kept,
    NonFinite,
    State,
    cached_by_arguments,
    compressed_levels,
    subtract_,
)
from accordion_bench.compressors.description import Traits, WhyDense, shorter_messages
from accordion_bench.compressors.probe import cheaper_than_dense
from accordion_bench.options.units import counted
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.same_shape import zero_rows


def _why_dense(compressor: "Gathered", spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
    if not compressor.compresses(spec, level) or compressor.pays(spec, level, workers):
        return None
    at = f" at {compressor.traits.knob} {level:g}" if compressor.traits.knob else ""
    reason = f"an all-gather of messages{at} from {counted(workers, 'worker')} would cost more than a dense all-reduce"
    two_way = ({"compressor.collective": "two_way"},) if "two_way" in compressor.traits.collectives else ()
    return WhyDense(reason, (*two_way, *shorter_messages(compressor)) or ("fewer workers",))


class Gathered(Compressor):
    """update = mean_w decode(encode(g_w)): a bucket is one message that contains everything a receiver needs.

    A subclass defines `layout`, `encode_bucket` and `add_bucket_`. Messages are exchanged by all-gather. If that would
    cost more wire bytes than a dense all-reduce, the decoded tensors are exchanged by dense all-reduce instead. The
    number of workers thus changes the bytes, but never the training (up to the order of summation).
    """

    description = replace(
        Compressor.description, collective_reason="its messages cannot be summed", why_dense=_why_dense
    )

    traits = Traits(collectives=("all_gather", "two_way"))
    entropy: str = "none"  # how entropy_bytes counts the codes, see `entropy.coded_bytes`
    stream: str = ""  # name of the random stream; must never change
    takes_empty: bool = False  # whether `add_bucket_` accepts uninitialised targets

    def layout(self, specs: Sequence[TensorSpec], levels: Sequence[float]) -> Layout:
        """Return the fields of the message of a bucket, with the largest counts if `fixed_size` is false.

        Equal arguments should return the same object, because kernels cache tables for each layout.
        """
        raise NotImplementedError

    def encode_bucket(self, bucket: Bucket) -> Message:
        """Return the messages of the local workers.

        Raises:
            NonFiniteRow: row w T + t is the tensor t of the w-th of these workers.
        """
        raise NotImplementedError

    def add_bucket_(self, target: Target, message: Message, bucket: Bucket) -> None:
        """Add decoded messages of all senders to a target; of the bucket that was encoded, no coordinates are read."""
        raise NotImplementedError

    def encode_fed(self, bucket: Bucket) -> Message:
        """Return the messages of tensors with residuals, and set the residuals to the compression error."""
        formed, feedback = bucket.formed(), bucket.feedback
        message = self.encode_bucket(formed)
        if feedback is not None:
            self.add_bucket_(Target(feedback.rows_W, -1.0), message, formed)
            feedback.mask()
        return message

    def encode_for(self, bucket: Bucket, gathered: int, comm: Comm) -> Message:
        """Return the messages in an exchange that gathers the first `gathered` tensors."""
        return self.encode_bucket(bucket)

    def saved_bytes(self, message: Message, bucket: Bucket) -> int:
        """Return the bytes that entropy coding would save in all senders' messages, if there is an option `entropy`."""
        raise NotImplementedError

    # ---- derived from these

    @cached_by_arguments
    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        """Return the length of one tensor's message, or the largest possible length if `fixed_size` is false."""
        return self.layout((spec,), (level,)).nbytes

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        return [Transfer("all_gather", self.message_bytes(spec, level))]

    pays = cheaper_than_dense

    def gather(self, message: Message, bucket: Bucket, comm: Comm) -> Message:
        """Return all workers' messages of a bucket, given those of the local workers."""
        size = message.layout.nbytes
        rows = comm.all_gather(message.rows[:, :size]) if size else message.rows.new_empty(comm.workers, 0)
        return Message(rows, [message.layout] * comm.workers)

    def combined(self, likes: Sequence[Tensor], from_all: Message, bucket: Bucket) -> Sequence[Tensor]:
        """Return the update of a bucket's tensors, shaped like `likes`: the mean of all workers' decoded messages."""
        target = target_like(likes, self.takes_empty, divisor=len(from_all.layouts))
        self.add_bucket_(target, from_all, bucket)
        return target.rows_R

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        compressed = compressed_levels(self, ctx)
        gathered = [i for i, level in compressed.items() if self.pays(ctx.specs[i], level, comm.workers)]
        decoded_here = [i for i in compressed if i not in gathered]  # decoded by the sender, then exchanged dense
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
            from_all = self.gather(sent.message.take(first), part, comm)
            means = self.combined([xs_W[i][0] for i in gathered], from_all, part)
            for i, mean in zip(gathered, means, strict=True):
                update[i] = mean.view(xs_W[i][0].shape)
            if self.entropy != "none":
                saved = self.saved_bytes(from_all, part)
        if self.entropy != "none":
            comm.ledger.entropy_count(saved)

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            subtract_({i: target_W for i, target_W in targets_W.items() if i not in compressed}, xs_W)
            sent.add_own_(targets_W, -1.0)

        return Exchanged(update, subtract_sent_, functools.partial(sent.add_own_, clears=True))


class OwnerMeans(NamedTuple):
    """Result of `average_at_owners`.

    message: of the local workers, with all tensors.
    layouts: layout of each owner's part of a message.
    means_W: for each local worker, the means over all workers of the tensors that it owns, [1, N] each.
    """

    message: Message
    layouts: list[Layout]
    means_W: list[list[Tensor]]


def average_at_owners(compressor: Gathered, bucket: Bucket, counts: Sequence[int], comm: Comm) -> OwnerMeans:
    """Encode all tensors on every worker, send each to its owner, and average it there.

    Args:
        compressor, comm: encode and send the messages.
        bucket: tensors of all owners, those of the first owner first; residuals become the compression error.
        counts: number of tensors that each worker of the run owns.

    Raises:
        NonFiniteRow: as `Gathered.encode_bucket`.
    """
    if not bucket.specs:
        nothing = Message(torch.empty(len(bucket.workers), 0, dtype=torch.uint8), [])
        return OwnerMeans(nothing, [compressor.layout([], []) for _ in counts], [[] for _ in bucket.workers])
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
    return OwnerMeans(sent, layouts, means_W)


class Sent:
    """Tensors of an exchange, and the messages that the local workers send of them.

    Args:
        gathered, others: indices of the tensors whose messages are gathered, and of the other encoded tensors.
        compressor, xs_W, ctx, comm: of the exchange.

    Attributes:
        place: position of each tensor among the encoded ones, by index.
        bucket, message: the encoded tensors, and their messages.

    Raises:
        NonFinite: names the tensor and its worker.
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
        if ids:
            with naming(ctx, ids, comm.first_named):
                self.message = compressor.encode_for(self.bucket, len(gathered), comm)

    def decoded(self, ids: Sequence[int]) -> list[Tensor]:
        """Return the decoded messages of the local workers for some tensors, [W, ...], adjacent in memory."""
        if not ids:
            return []
        ks = [self.place[i] for i in ids]
        xs_W, part = [self.bucket.xs_W[k] for k in ks], self.bucket.take(ks)
        target = target_like(xs_W, self.compressor.takes_empty, rows=len(xs_W[0]))
        self.compressor.add_bucket_(target, self.message.take(ks), part)
        return [row_W.view(x_W.shape) for row_W, x_W in zip(target.rows_R, xs_W, strict=True)]

    def add_own_(self, targets_W: Mapping[int, Tensor], alpha: float = 1.0, clears: bool = False) -> None:
        """Compute target [W, ...] += alpha x the decoded local messages, by index; other tensors are unchanged."""
        rows_W = {
            self.place[i]: target_W.view(len(target_W), -1) for i, target_W in targets_W.items() if i in self.place
        }
        if ks := sorted(rows_W):
            target = Target([rows_W[k] for k in ks], alpha, clears=clears)
            self.compressor.add_bucket_(target, self.message.take(ks), self.bucket.take(ks))


def target_like(xs: Sequence[Tensor], may_be_empty: bool, rows: int = 1, divisor: int = 1) -> Target:
    """Return rows [R, N] with the sizes of the tensors, adjacent in memory: uninitialised, or zeros (free on a CPU)."""
    sizes, empty = [x.numel() for x in xs], may_be_empty and engine_for(xs).fills
    make = torch.empty if empty else zero_rows
    parts = make(1, sum(sizes), device=xs[0].device, dtype=xs[0].dtype)[0].split(sizes)
    return Target([part.view(rows, -1) for part in parts], divisor=divisor, empty=empty)


@contextlib.contextmanager
def naming(ctx: Context, ids: Sequence[int], first_named: int) -> Iterator[None]:
    """Turn an error in the encoding of some tensors into one that names the tensor and the worker."""
    try:
        yield
    except NonFiniteRow as bad:
        worker, k = divmod(bad.row, len(ids))
        raise non_finite(ctx, ids[k], first_named + worker) from None


def non_finite(ctx: Context, i: int, worker: int) -> NonFinite:
    """Return the error for a tensor that cannot be encoded."""
    return NonFinite(f"the compressor input of worker {worker} for {ctx.specs[i].name} is not finite")
