"""Clock: where the time of a run goes.

`lap(part)` gives the main thread's time since the last mark to `part`; these exclusive parts sum to the total. What an
exchange does, on whichever thread, is split into encode, comm and decode by the marks that `Comm` leaves around its
collectives, and kept per bucket, for the modelled clock. On a GPU marks are CUDA events, read only once an epoch, so
that measuring never waits for the device.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from accordion_bench.comm.ledger import Ledger

EXCLUSIVE = ("data", "compute", "exposed", "update", "policy")
CONCURRENT = ("encode", "comm", "decode")
OF_BUCKET = ("ready", "encode", "decode", "wire", "rounds")


class Stage(NamedTuple):
    """One bucket of an exchange, means over the exchanges of a run.

    ready: seconds from the start of a worker's step until its tensors were there.
    encode, decode: seconds of work before its last collective ended, and after.
    wire: bytes that one worker sends.
    rounds: of collectives, one after another.
    """

    ready: float
    encode: float
    decode: float
    wire: float
    rounds: float


class ExchangeKind(NamedTuple):
    """Exchanges that are alike.

    what: that is exchanged.
    workers: that take part.
    """

    what: str
    workers: int


class ExchangePart(NamedTuple):
    """What the clock counts of one kind of exchange, or of one of its buckets.

    kind: of exchange.
    part: `count`, `wait`, `wait_squared`; of a bucket `encode`, `comm`, `decode`, `ready`, `wire`, `rounds`.
    bucket: its number; None = of the whole exchange.
    """

    kind: ExchangeKind
    part: str
    bucket: int | None = None

    @property
    def name(self) -> str:
        """As checkpoints spell it: `gradient-4.wait`, `gradient-4.0.ready`."""
        bucket = [] if self.bucket is None else [str(self.bucket)]
        return ".".join([f"{self.kind.what}-{self.kind.workers}", *bucket, self.part])


def part_named(name: str) -> str | ExchangePart:
    """What a checkpoint calls so: a part of the main thread's time, or a part of an exchange."""
    head, *rest = name.split(".")
    if not rest:
        return name
    *bucket, part = rest
    what, _, workers = head.rpartition("-")
    return ExchangePart(ExchangeKind(what, int(workers)), part, int(bucket[0]) if bucket else None)


class Span(NamedTuple):
    """A stretch of time on one thread, for timelines."""

    name: str
    thread: str
    start: Any
    end: Any


class Clock:
    """Laps of one process.

    Args:
        device: where the work runs; its kind decides how marks are taken.

    Attributes:
        totals: seconds per part; of exchanges also how many there were, and what their buckets have sent.
        warm: until set, everything counts as warm-up.
        timeline: spans, where it is a list.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.warm = False
        self.totals: dict[str | ExchangePart, float] = defaultdict(float)
        self.timeline: list[Span] | None = None
        self._spans: list[tuple[str | ExchangePart, Any, Any]] = []
        self._collectives: list[tuple[Any, Any]] | None = None  # of the exchange that is running
        self._ready: dict[int, tuple[Any, Any]] = {}  # per bucket: since when is counted, and when it was ready
        self.start()

    def mark(self) -> Any:
        """A point in time, on the host or in the device's queue."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Start anew: what happened since the last lap (evaluation, writing) belongs to no part."""
        self._last = self._step = self.mark()

    def lap(self, part: str) -> None:
        """Give the time since the last mark to `part`."""
        start, now = self._last, self.mark()
        self._last = now
        self._add(part if self.warm else "warmup", start, now)
        self._note(part, "main", start, now)

    # ---- exchanges

    def worker(self) -> None:
        """A local worker's step begins; of the last one's, it is noted when buckets are ready."""
        self._step = self._last

    def ready(self, bucket: int) -> None:
        """The tensors of a bucket are there; those of which nothing is said are ready when they are waited for."""
        self._ready[bucket] = self._step, self.mark()

    def launched(self, buckets: int) -> Any:
        """All buckets are ready now, and time is counted from here on; returns what `waits` is to be told."""
        now = self.mark()
        self._ready = dict.fromkeys(range(buckets), (now, now))
        return now

    def waits(self, kind: ExchangeKind, since: Any = None) -> None:
        """The main thread has nothing left to do but to wait for an exchange, or to make it.

        Args:
            kind: of the exchange.
            since: its launch; None = the start of the step.
        """
        if self.warm:
            self._add(ExchangePart(kind, "wait"), self._step if since is None else since, self._last)
            self.totals[ExchangePart(kind, "count")] += 1

    @contextlib.contextmanager
    def exchanging(self, kind: ExchangeKind, bucket: int, ledger: Ledger) -> Iterator[None]:
        """Around the exchange of one bucket, on the thread that makes it.

        Args:
            kind: of the exchange.
            bucket: its number.
            ledger: where its bytes are counted.
        """
        sent, rounds = ledger.counts["wire"], ledger.counts["rounds"]
        start = self.mark()
        ready = self._ready.pop(bucket, None) or (self._step, self._last)
        collectives: list[tuple[Any, Any]] = []
        self._collectives = collectives
        yield
        self._collectives = None
        now = self.mark()
        cursor = start
        for begin, end in collectives:
            self._concurrent(kind, bucket, "encode", cursor, begin)
            self._concurrent(kind, bucket, "comm", begin, end)
            cursor = end
        self._concurrent(kind, bucket, "decode", cursor, now)
        if self.warm:
            self._add(ExchangePart(kind, "ready", bucket), *ready)
            self.totals[ExchangePart(kind, "wire", bucket)] += (ledger.counts["wire"] - sent) / ledger.workers
            self.totals[ExchangePart(kind, "rounds", bucket)] += ledger.counts["rounds"] - rounds

    def _concurrent(self, kind: ExchangeKind, bucket: int, part: str, start: Any, end: Any) -> None:
        if self.warm:
            self._add(part, start, end)
            self._add(ExchangePart(kind, part, bucket), start, end)
        self._note(f"{part} {bucket}", "exchange", start, end)

    def collective(self, start: Any) -> None:
        """A collective that began at `start` has ended."""
        if self._collectives is not None:
            self._collectives.append((start, self.mark()))
        elif self.warm:  # of no exchange: an exact average, buffers
            self._add("comm", start, self.mark())

    # ---- reading

    def _add(self, part: str | ExchangePart, start: Any, end: Any) -> None:
        if self.cuda:
            self._spans.append((part, start, end))
        else:
            self._count(part, end - start)

    def _count(self, part: str | ExchangePart, seconds: float) -> None:
        self.totals[part] += seconds
        if isinstance(part, ExchangePart) and part.part == "wait":
            self.totals[part._replace(part="wait_squared")] += seconds**2

    def _note(self, name: str, thread: str, start: Any, end: Any) -> None:
        timeline = self.timeline  # which another thread may end
        if timeline is not None:
            timeline.append(Span(name, thread, start, end))

    def read(self) -> dict[str | ExchangePart, float]:
        """Seconds so far per part; waits for the device."""
        if self._spans:
            torch.cuda.synchronize()
            for part, start, end in self._spans:
                self._count(part, start.elapsed_time(end) / 1000)
            self._spans.clear()
        return dict(self.totals)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"clock": {part.name if isinstance(part, ExchangePart) else part: n for part, n in self.read().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.totals.update({part_named(name): number for name, number in state["clock"].items()})

    def events(self) -> list[dict[str, Any]]:
        """The timeline in the format of Chrome's traces, from its first span on; waits for the device."""
        spans = self.timeline or []
        if not spans:
            return []
        if self.cuda:
            torch.cuda.synchronize()
        origin = spans[0].start

        def micro(start: Any, end: Any) -> float:
            return 1000 * start.elapsed_time(end) if self.cuda else 1e6 * (end - start)

        return [
            {
                "name": s.name,
                "ph": "X",
                "pid": 0,
                "tid": s.thread,
                "ts": micro(origin, s.start),
                "dur": micro(s.start, s.end),
            }
            for s in spans
        ]

    def exchanges(self) -> dict[ExchangeKind, tuple[int, float, float, list[Stage]]]:
        """Per kind of exchange: how many there were, when they were waited for (mean, deviation), the buckets."""
        totals, found = self.read(), {}
        for kind in [key.kind for key in totals if isinstance(key, ExchangePart) and key.part == "count"]:
            count = totals[ExchangePart(kind, "count")]
            stages: list[Stage] = []
            while ExchangePart(kind, "wire", len(stages)) in totals:
                of_bucket = [totals.get(ExchangePart(kind, part, len(stages)), 0.0) for part in OF_BUCKET]
                stages.append(Stage(*(total / count for total in of_bucket)))
            mean = totals[ExchangePart(kind, "wait")] / count
            spread = max(0.0, totals.get(ExchangePart(kind, "wait_squared"), 0.0) / count - mean**2) ** 0.5
            found[kind] = int(count), mean, spread, stages
        return found

    def columns(self, measures_comm: bool) -> dict[str, float | None]:
        """Time columns of a metrics row: `seconds` of training, its exclusive parts, and what exchanges took.

        Args:
            measures_comm: false where a process hosts several workers: no communication time can be measured then.
        """
        totals = self.read()
        parts: dict[str, float | None] = {f"{part}_seconds": totals.get(part, 0.0) for part in EXCLUSIVE + CONCURRENT}
        if not measures_comm:
            parts["comm_seconds"] = None
        return {
            "seconds": sum(totals.get(part, 0.0) for part in EXCLUSIVE),
            **parts,
            "warmup_seconds": totals.get("warmup", 0.0),
        }
