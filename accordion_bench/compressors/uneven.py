"""Uneven: one-shot compressors whose messages have a length that depends on the data.

Tensor suffixes: W local workers, A all workers, R rows, N elements.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Context, Target
from accordion_bench.codecs.non_finite import NonFiniteRow
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.oneshot import OneShot
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import kernels

SIZE = 4  # bytes that tell how long a message is; they travel first

Messages = list[list[Tensor]]
"""For each tensor its senders' messages, bytes [B] each."""


class Parcels(NamedTuple):
    """For each tensor its senders' messages."""

    of: Messages

    def take(self, which: Sequence[int]) -> "Parcels":
        """Those of some tensors."""
        return Parcels([self.of[k] for k in which])


class Uneven(OneShot):
    """`encode` gives a list of messages, `add_decoded_` is called with one of them, and `message_bytes` is a bound."""

    traits = replace(OneShot.traits, collectives=("all_gather",), fixed_size=False)

    header: int | None = None  # bytes before indices with signs; None = values and indices

    def entries(self, message: Tensor, spec: TensorSpec) -> int:
        """How many entries a sparse message [B] holds; asked where `traits.kernels` says that kernels add it."""
        raise NotImplementedError

    def sent_bytes(self, spec: TensorSpec, level: float) -> int:
        return SIZE + self.message_bytes(spec, level)

    def encode_all(
        self,
        rows_W: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        levels: Sequence[float],
        ctx: Context,
        workers: Sequence[int],
        purpose: str = "",
    ) -> Messages:
        messages = []
        for k, (x_W, spec, level) in enumerate(zip(rows_W, specs, levels, strict=True)):
            try:
                messages.append(self.encode(x_W, spec, level, ctx, self.keys(ctx, spec.name, workers, purpose)))
            except NonFiniteRow as bad:
                raise NonFiniteRow(bad.row * len(specs) + k) from None
        return messages

    def encode_bucket(self, bucket: Bucket) -> Any:
        own = bucket.rows_W, bucket.specs, bucket.levels
        return Parcels(self.encode_all(*own, bucket, bucket.workers, bucket.purpose))

    def add_bucket_(self, target: Target, message: Any, bucket: Bucket) -> None:
        rows = dict(enumerate(target.rows_R))
        self.add_all_(rows, message.of, bucket.specs, bucket.levels, bucket, target.alpha, target.divisor)

    def gather(self, message: Any, bucket: Bucket, comm: Comm) -> Any:
        return Parcels(self.gathered(message.of, bucket.specs, bucket.levels, comm))

    def gathered(
        self, message_W: Messages, specs: Sequence[TensorSpec], levels: Sequence[float], comm: Comm
    ) -> Messages:
        owned_W = [[own_W[w] for own_W in message_W[: len(specs)]] for w in range(comm.local_workers)]
        sizes_A = comm.all_gather_sizes([[len(own) for own in owned] for owned in owned_W])
        everyones = comm.all_gather_uneven([torch.cat(owned) for owned in owned_W], [sum(sizes) for sizes in sizes_A])
        parts_A = [message.split(sizes) for message, sizes in zip(everyones, sizes_A, strict=True)]
        return [list(of_tensor) for of_tensor in zip(*parts_A, strict=True)]

    def add_all_(
        self,
        targets_R: Mapping[int, Tensor],
        message_A: Messages,
        specs: Sequence[TensorSpec],
        levels: Sequence[float],
        ctx: Context,
        alpha: float = 1.0,
        divisor: int = 1,
    ) -> None:
        if "cpu" in self.traits.kernels and kernels.usable(list(targets_R.values())):
            from accordion_bench.compressors.sparse_rows import add_chosen_

            own_A = [message_A[k] for k in targets_R]
            kept = [[self.entries(own, specs[k]) for own in message_A[k]] for k in targets_R]
            add_chosen_(list(targets_R.values()), own_A, kept, alpha, divisor, header=self.header)
            return
        for k, target_R in targets_R.items():
            for a, own in enumerate(message_A[k]):
                row = target_R[a % len(target_R)][None]
                self.add_decoded_(row, own[None, None], specs[k], levels[k], ctx, alpha)
            if divisor != 1:
                target_R.div_(divisor)
