"""What the clock measures: parts of a run, kinds of exchanges under a plan, and stages of a bucket; without torch."""

import math
from collections.abc import Mapping
from typing import NamedTuple

EXCLUSIVE = ("data", "compute", "exposed", "update", "policy")  # parts of the main thread's time, all of it
MATTERS = 0.01  # of the training time, from which outliers are told


class Stage(NamedTuple):
    """One bucket of the exchanges of one kind."""

    ready: float  # seconds from the start of a worker's step until its tensors were there; median
    # encode, decode: seconds of work before its last collective ended, and after; medians
    encode: float
    decode: float
    wire: float  # bytes that one worker sends; mean over exchanges and workers
    rounds: float  # of collectives, one after another; mean
    kinds: Mapping[str, tuple[float, float]] | None = None  # (wire, rounds) by kind of collective; None = not known

    @property
    def by_kind(self) -> Mapping[str, tuple[float, float]]:
        """(wire, rounds) by kind of collective; where it is not known, all of it as an all-reduce's."""
        return self.kinds or {"all_reduce": (self.wire, self.rounds)}


class InForce(NamedTuple):
    """The properties of a plan on which the time of an exchange depends."""

    batch_size: int  # samples per worker and step, which decides when buckets are ready
    payload: int  # bytes that a worker sends per exchange, which follow from the compression levels

    def distance(self, other: "InForce") -> tuple[float, int]:
        """Distance to another plan: |log ratio| of the batch sizes, then the difference of the payloads."""
        return abs(math.log(self.batch_size / other.batch_size)), abs(self.payload - other.payload)


class ExchangeKind(NamedTuple):
    """A kind of exchange, for which times are collected."""

    what: str  # noun for the exchanged tensors, e.g. `gradient`
    workers: int  # number of workers that take part
    plan: InForce | None = None  # the current plan; None = unknown

    @property
    def name(self) -> str:
        """Name in checkpoints: `gradient-4`, `gradient-4@32x1000`."""
        plan = "@{}x{}".format(*self.plan) if self.plan else ""
        return f"{self.what}-{self.workers}{plan}"

    @classmethod
    def named(cls, name: str) -> "ExchangeKind":
        """Parse a name from a checkpoint."""
        head, _, plan = name.partition("@")
        what, _, workers = head.rpartition("-")
        return cls(what, int(workers), InForce(*map(int, plan.split("x"))) if plan else None)


class ExchangePart(NamedTuple):
    """A quantity that the clock collects for a kind of exchange, or for one of its buckets."""

    kind: ExchangeKind  # kind of exchange
    # `count`, `wait` or `full_wait` (the wait in steps with a full batch); for a bucket `encode`, `decode`, `ready`,
    # `wire`, `rounds`, `all_gather_wire` and so on
    part: str
    bucket: int | None = None  # number of the bucket; None = the whole exchange

    @property
    def name(self) -> str:
        """Name in checkpoints: `gradient-4.wait`, `gradient-4.0.ready`."""
        bucket = [] if self.bucket is None else [str(self.bucket)]
        return ".".join([self.kind.name, *bucket, self.part])

    @classmethod
    def named(cls, name: str) -> "ExchangePart":
        """Parse a name from a checkpoint."""
        head, *bucket, part = name.split(".")
        return cls(ExchangeKind.named(head), part, int(bucket[0]) if bucket else None)


def part_named(name: str) -> str | ExchangePart:
    """Parse a name from a checkpoint: of a part of the main thread's time, or of an exchange."""
    return ExchangePart.named(name) if "." in name else name
