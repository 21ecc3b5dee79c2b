"""What the exchange of a method costs on these tensors, for any number of workers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from accordion_bench.comm.clock import Stage
from accordion_bench.network.collective_costs import PAIRS, wire_and_rounds

FP32, BF16 = ("compressor=none",), ("compressor=bf16",)  # overrides of the baselines, with which others are compared


class Messages(NamedTuple):
    """Messages of one kind of collective in the exchange of a bucket.

    A worker of A hands over `fixed + shared / A` bytes in all.

    fixed: bytes, whatever the number of workers.
    shared: bytes that the workers divide among them, such as the sections of a two-way method.
    times: collectives, one after another.
    """

    fixed: float
    shared: float
    times: float

    def payload(self, workers: int) -> float:
        """Bytes that one worker hands over."""
        return self.fixed + self.shared / workers


@dataclass(frozen=True)
class BucketCost:
    """One bucket of an exchange; seconds of one worker alone on its device, medians.

    Args:
        members: its tensors, by index.
        encode: seconds of work before the last collective has ended.
        decode: seconds after it, (fixed, for each worker of the run): A workers take `fixed + A per_worker`.
        messages: by kind of collective: `all_reduce`, `all_gather`, `all_to_all`, `send_receive`.
    """

    members: tuple[int, ...]
    encode: float
    decode: tuple[float, float]
    messages: Mapping[str, Messages]

    def stage(self, ready: float, workers: int) -> Stage:
        """The bucket as the modelled clock takes it, for so many workers."""
        kinds = {
            kind: wire_and_rounds(kind, sent.payload(workers), sent.times, workers)
            for kind, sent in self.messages.items()
        }
        wire, rounds = (sum(each[i] for each in kinds.values()) for i in (0, 1))
        return Stage(ready, self.encode, self.decode[0] + self.decode[1] * workers, wire, rounds, kinds)

    def scaled(self, factor: float) -> "BucketCost":
        """The same with a codec that takes so many times as long."""
        return replace(self, encode=factor * self.encode, decode=(factor * self.decode[0], factor * self.decode[1]))


@dataclass(frozen=True)
class MethodCost:
    """One method, or one setting of it.

    Args:
        name: as reports spell it: `PowerSGD, rank 4`.
        overrides: what to type for it: `compressor=powersgd compressor.rank=4`.
        buckets: in the order in which they travel.
        state: bytes that the method keeps in each worker beside the model: residuals, momentum, warm starts.
        extra: seconds that each step takes longer because of the method, outside the exchange (a step of its own).
        overlaps: buckets leave while the backward pass goes on.
        local: workers take local steps, and exchange differences every `period` steps, after the step.
        period: of a local method, steps from one exchange to the next; 1 otherwise.
        parts: of a local method that exchanges some tensors at a time, the buckets of each exchange of a period, by
            index; () = all of them at once.
        delay: of a local method with `overlaps`, steps that an exchange travels beside; None = until the next one.
        every_local_step: of a local method that exchanges after every step, so that no period is looked for.
        quorum: of a local method whose exchanges can go on without late workers.
        repetitions: seconds of codec of each measured exchange in all, for intervals.
        crowded_from: workers from which on messages of all of them would be longer than an all-reduce, so that most of
            what they would decode travels by one instead; infinity = never.
        crowded: the buckets from there on.
    """

    name: str
    overrides: tuple[str, ...]
    buckets: tuple[BucketCost, ...]
    state: float = 0.0
    extra: float = 0.0
    overlaps: bool = True
    local: bool = False
    period: int = 1
    parts: tuple[tuple[int, ...], ...] = ()
    delay: int | None = None
    every_local_step: bool = False
    quorum: bool = False
    repetitions: tuple[float, ...] = ()
    crowded_from: float = math.inf
    crowded: tuple[BucketCost, ...] = ()

    @property
    def baseline(self) -> bool:
        """Whether others are compared with it."""
        return self.overrides in (FP32, BF16)

    @property
    def in_pairs(self) -> bool:
        """Whether two workers wait for each other, and for nobody else."""
        return all(set(bucket.messages) == {PAIRS} for bucket in self.buckets)

    def among(self, workers: int) -> tuple[BucketCost, ...]:
        """The buckets of a run of so many workers."""
        return self.buckets if workers < self.crowded_from else self.crowded

    def stages(self, ready: Sequence[float], workers: int) -> list[Stage]:
        """All buckets, each ready with its last tensor.

        Args:
            ready: of each tensor.
            workers: A.
        """
        return [
            bucket.stage(max((ready[i] for i in bucket.members), default=0.0), workers)
            for bucket in self.among(workers)
        ]

    def exchanges(self, stages: Sequence[Stage]) -> list[list[Stage]]:
        """All buckets, by the exchange of a period in which they travel."""
        return [[stages[i] for i in part] for part in self.parts] or [list(stages)]

    @property
    def between(self) -> float:
        """Steps from one exchange of a period to the next one."""
        return self.period / max(1, len(self.parts))

    @property
    def beside(self) -> float:
        """Steps that an exchange of a local method travels beside."""
        return (self.between if self.delay is None else self.delay) if self.overlaps else 0.0

    def scaled(self, factor: float) -> "MethodCost":
        """The same with codecs that take so many times as long."""
        buckets, crowded = (tuple(one.scaled(factor) for one in few) for few in (self.buckets, self.crowded))
        return replace(self, buckets=buckets, crowded=crowded, extra=factor * self.extra)

    def payload(self, workers: int) -> float:
        """Bytes that one worker hands over in an exchange."""
        return sum(sent.payload(workers) for bucket in self.among(workers) for sent in bucket.messages.values())

    def wire(self, workers: int) -> float:
        """Bytes that one worker's link sends in an exchange."""
        return sum(bucket.stage(0.0, workers).wire for bucket in self.among(workers))
