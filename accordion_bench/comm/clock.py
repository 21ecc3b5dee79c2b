"""Clock: where the time of a run goes.

`lap(part)` gives the main thread's time since the last mark to `part`; these exclusive parts sum to the total. What an
exchange does, on whichever thread, is split into encode, comm and decode by the marks that `Comm` leaves around its
collectives, and kept per bucket, for the modelled clock. `step_over` closes a step: what its parts have taken is kept,
so that the modelled clock can tell what they usually take. On a GPU marks are CUDA events, read once an epoch or when
very many of them are over, so that measuring never waits for the device.

Marks within a captured graph are taken anew by each replay. They are read in sampled steps, one of `SAMPLED`, at the
end of which the host waits; what they say then counts for the steps in between, too. Where several local workers
compute at the same time they have no times of their own. Then they compute one after another in sampled steps, and the
times of a worker are those.
"""

import contextlib
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from accordion_bench.comm.graphs import Graphs, ReplayedMark
from accordion_bench.comm.ledger import KINDS, Ledger
from accordion_bench.comm.samples import Phase, Series, Steps
from accordion_bench.comm.stages import EXCLUSIVE, Stage

CONCURRENT = ("encode", "comm", "decode")
OF_BUCKET = ("ready", "encode", "decode", "wire", "rounds")
PLANS = 16  # that are told apart
UNREAD = 10_000  # spans of a GPU that may wait to be read
SAMPLED = 20  # of so many steps one is sampled
FIRST = 5  # that is sampled: earlier ones are eager
OF_WORKER = ("ready", "wait", "full_wait")  # parts of exchanges that one worker's pass decides


class InForce(NamedTuple):
    """What of a plan decides how long an exchange takes.

    batch_size: samples per worker and step, during which buckets become ready.
    payload: bytes that a worker hands over in all, which follow from the levels.
    """

    batch_size: int
    payload: int

    def distance(self, other: "InForce") -> tuple[float, int]:
        """How far another one is: batch sizes first, as a ratio."""
        return abs(math.log(self.batch_size / other.batch_size)), abs(self.payload - other.payload)


class ExchangeKind(NamedTuple):
    """Exchanges that are alike.

    what: that is exchanged.
    workers: that take part.
    plan: in force; None = not told.
    """

    what: str
    workers: int
    plan: InForce | None = None

    @property
    def name(self) -> str:
        """As checkpoints spell it: `gradient-4`, `gradient-4@32x1000`."""
        plan = "@{}x{}".format(*self.plan) if self.plan else ""
        return f"{self.what}-{self.workers}{plan}"

    @classmethod
    def named(cls, name: str) -> "ExchangeKind":
        """What a checkpoint calls so."""
        head, _, plan = name.partition("@")
        what, _, workers = head.rpartition("-")
        return cls(what, int(workers), InForce(*map(int, plan.split("x"))) if plan else None)


class ExchangePart(NamedTuple):
    """What the clock counts of one kind of exchange, or of one of its buckets.

    kind: of exchange.
    part: `count`, `wait`, `full_wait` (in steps of a whole batch); of a bucket `encode`, `decode`, `ready`, `wire`,
        `rounds`, `all_gather_wire` and so on.
    bucket: its number; None = of the whole exchange.
    """

    kind: ExchangeKind
    part: str
    bucket: int | None = None

    @property
    def name(self) -> str:
        """As checkpoints spell it: `gradient-4.wait`, `gradient-4.0.ready`."""
        bucket = [] if self.bucket is None else [str(self.bucket)]
        return ".".join([self.kind.name, *bucket, self.part])

    @classmethod
    def named(cls, name: str) -> "ExchangePart":
        """What a checkpoint calls so."""
        head, *bucket, part = name.split(".")
        return cls(ExchangeKind.named(head), part, int(bucket[0]) if bucket else None)


def part_named(name: str) -> str | ExchangePart:
    """What a checkpoint calls so: a part of the main thread's time, or a part of an exchange."""
    return ExchangePart.named(name) if "." in name else name


class StepEnd(NamedTuple):
    """What has been told before belongs to a step, or to what is done between two; `sampled` as of the clock."""

    phase: Phase
    sampled: bool


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
        totals: seconds per part; of exchanges how many there were, and what their buckets have sent.
        series: what exchanges have taken, one after another.
        steps: what steps have taken by part, one after another.
        plan: in force.
        warm: until set, everything counts as warm-up.
        timeline: spans, where it is a list.
        graphs: what captures work of the device.
        at_once: several local workers compute at the same time, but for sampled steps.
        sampled: whether this step is.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.graphs = Graphs()
        self.warm, self.at_once, self.sampled = False, False, True
        self.totals: dict[str | ExchangePart, float] = defaultdict(float)
        self.series: dict[ExchangePart, Series] = defaultdict(Series)
        self.steps = Steps()
        self.plan: InForce | None = None
        self.timeline: list[Span] | None = None
        self._plans: list[InForce] = []
        self._events: set[str] = set()  # of the step that is running
        self._taken: dict[str, float] = defaultdict(float)  # by its parts
        self._waits: list[tuple[ExchangeKind, tuple[Any, Any]]] = []  # in it
        self._spans: deque[tuple[str | ExchangePart | StepEnd, Sequence[tuple[Any, Any]]]] = deque()  # not read yet
        self._collectives: list[tuple[Any, Any]] | None = None  # of the exchange that is running
        self._ready: dict[int, tuple[Any, Any]] = {}  # per bucket: since when is counted, and when it was ready
        self._noted: list[Callable[[], None]] | None = None  # what each replay of the work being captured is to count
        self._unread: Counter[str | ExchangePart] = Counter()  # times that a part was replayed since it was read
        self._begun = 0  # steps
        self._sampled_plans: set[InForce] = set()
        self._one_by_one = 1, 0.0  # samples and seconds of computing of the last sampled step
        self.start()

    def mark(self) -> Any:
        """A point in time, on the host or in the device's queue."""
        if not self.cuda:
            return time.perf_counter()
        if (replayed := self.graphs.mark()) is not None:
            return replayed
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another, both of which are over."""
        return _event(start).elapsed_time(_event(end)) / 1000 if self.cuda else end - start

    @contextlib.contextmanager
    def deferred(self) -> Iterator[list[Callable[[], None]]]:
        """Inside, nothing is counted; what is to be is counted by calling what the list holds, at each replay."""
        again: list[Callable[[], None]] = []
        self._noted = again
        try:
            yield again
        finally:
            self._noted = self._collectives = None

    def _count_now(self, count: Callable[[], None]) -> None:
        """Count, unless work is being captured: then at each of its replays."""
        if self._noted is None:
            count()
        else:
            self._noted.append(count)

    def start(self) -> None:
        """Start anew: what happened since the last lap (evaluation, writing) belongs to no part."""
        self._last = self._step = self.mark()

    def lap(self, part: str) -> None:
        """Give the time since the last mark to `part`."""
        start, now = self._last, self.mark()
        self._last = now
        self._add(part if self.warm else "warmup", (start, now))
        self._note(part, "main", start, now)

    # ---- steps

    def in_force(self, batch_size: int, payload: int) -> None:
        """A step begins under a plan; of very many plans, one counts as the nearest of the first ones.

        Args:
            batch_size: samples per worker and step.
            payload: bytes that a worker hands over in an exchange.
        """
        plan = InForce(batch_size, payload)
        if plan not in self._plans and len(self._plans) == PLANS:
            plan = min(self._plans, key=plan.distance)
        elif plan not in self._plans:
            self._plans.append(plan)
        self.plan = plan
        self.sampled = self._begun % SAMPLED == FIRST or (self.warm and plan not in self._sampled_plans)
        if self.sampled and self.warm:
            self._sampled_plans.add(plan)

    def event(self, name: str) -> None:
        """Something takes place in this step that does not in every one, and takes its time."""
        self._events.add(name)

    def step_over(self, samples: int = 0) -> None:
        """A step is over, or what was to be done between steps.

        Args:
            samples: of one worker in it; 0 = it was no step.
        """
        phase = Phase(samples, tuple(sorted(self._events)))
        self._events.clear()
        for kind, stretch in self._waits:
            if kind.plan is None or samples == kind.plan.batch_size:
                self._add(ExchangePart(kind, "full_wait"), stretch)
        self._waits.clear()
        end = StepEnd(phase, self.sampled)
        self._begun += samples > 0
        if not self.cuda:
            self._keep(end)
            return
        self._spans.append((end, ()))
        if self.graphs.captures and self.sampled:
            self.read()
        elif len(self._spans) > UNREAD:
            self._read_over()

    def _keep(self, end: StepEnd) -> None:
        if not self._taken:
            return
        if self.at_once and end.phase.samples:
            self._compute_one_by_one(end)
        self.steps.add(end.phase, self._taken)
        self._taken.clear()

    def _compute_one_by_one(self, end: StepEnd) -> None:
        """Let a step have taken what it takes where workers compute one after another."""
        taken, (samples, seconds) = self._taken["compute"], self._one_by_one
        if end.sampled or not seconds:
            self._one_by_one = end.phase.samples, taken
            return
        self._taken["compute"] = seconds * end.phase.samples / samples
        self.totals["overlapped"] += self._taken["compute"] - taken

    # ---- exchanges

    def worker(self) -> None:
        """A local worker's step begins; of the last one's, it is noted when buckets are ready."""
        self._step = self._last

    def ready(self, bucket: int) -> None:
        """The tensors of a bucket are there; those of which nothing is said are ready when they are waited for."""
        mark = self.mark()

        def note() -> None:
            self._ready[bucket] = self._step, mark

        self._count_now(note)

    def launched(self, buckets: int) -> Any:
        """All buckets are ready now, and time is counted from here on; returns what `waits` is to be told."""
        self.event("launch")
        now = self.mark()
        self._ready = dict.fromkeys(range(buckets), (now, now))
        return now

    def waits(self, kind: ExchangeKind, since: Any = None) -> None:
        """The main thread has nothing left to do but to wait for an exchange, or to make it.

        Args:
            kind: of the exchange.
            since: its launch; None = the start of the step.
        """
        self.event(kind.name)
        if self.warm:
            kind = kind._replace(plan=self.plan)
            stretch = self._step if since is None else since, self._last
            self._add(ExchangePart(kind, "wait"), stretch)
            self._waits.append((kind, stretch))
            self.totals[ExchangePart(kind, "count")] += 1

    @contextlib.contextmanager
    def exchanging(self, kind: ExchangeKind, bucket: int, ledger: Ledger) -> Iterator[None]:
        """Around the exchange of one bucket, on the thread that makes it.

        Args:
            kind: of the exchange; its workers share the bytes, those who are late for it, too, as in the run's ledger.
            bucket: its number.
            ledger: where its bytes are counted.
        """
        sent, rounds, before = ledger.counts["wire"], ledger.counts["rounds"], dict(ledger.kinds)
        start = self.mark()
        ready = self._ready_mark(bucket)
        collectives: list[tuple[Any, Any]] = []
        self._collectives = collectives
        yield
        self._collectives = None
        begins, ends = zip(*collectives, strict=True) if collectives else ((), ())
        marks = [start, *ends, self.mark()]
        *encode, decode = zip(marks, [*begins, marks[-1]], strict=False)
        for part, stretches in (("encode", encode), ("comm", collectives), ("decode", [decode])):
            for begin, end in stretches:
                self._note(f"{part} {bucket}", "exchange", begin, end)
            if self.warm:
                self._add(part, *stretches)
        if not self.warm:
            return
        kind = kind._replace(plan=self.plan)
        if self._noted is None:
            self._add(ExchangePart(kind, "ready", bucket), ready)
        else:  # each replay has another one
            self._noted.append(lambda: self._add(ExchangePart(kind, "ready", bucket), self._ready_mark(bucket)))
        for part, stretches in (("encode", encode), ("decode", [decode])):
            self._add(ExchangePart(kind, part, bucket), *stretches)
        sums = {"wire": (ledger.counts["wire"] - sent) / kind.workers, "rounds": ledger.counts["rounds"] - rounds}
        for name, now in ledger.kinds.items():
            if now != before[name]:
                own, made = (after - then for after, then in zip(now, before[name], strict=True))
                sums |= {f"{name}_wire": own / kind.workers, f"{name}_rounds": made}

        def count() -> None:
            for part, number in sums.items():
                self.totals[ExchangePart(kind, part, bucket)] += number

        self._count_now(count)

    def _ready_mark(self, bucket: int) -> tuple[Any, Any]:
        """Since when a bucket was waited for, and when it was ready; where that was not noted, now."""
        ready = self._ready.pop(bucket, None) if self._noted is None else None
        return ready or (self._step, self._last)

    def collective(self, start: Any) -> None:
        """A collective that began at `start` has ended."""
        if self._collectives is not None:
            self._collectives.append((start, self.mark()))
        elif self.warm:  # of no exchange: an exact average, buffers
            self._add("comm", (start, self.mark()))

    # ---- reading

    def _add(self, part: str | ExchangePart, *stretches: tuple[Any, Any]) -> None:
        """Stretches of time that belong to one part; together, one value of a series."""
        if self._noted is not None:
            self._noted.append(lambda: self._add(part, *stretches))
        elif not self.sampled and self._only_sampled(part, stretches):
            self._unread[part] += 1
        elif not self.cuda:
            self._count(part, sum(end - start for start, end in stretches))
        else:
            self._spans.append((part, stretches))

    def _only_sampled(self, part: str | ExchangePart, stretches: Sequence[tuple[Any, Any]]) -> bool:
        """Whether a part is read, or stands for what it is to tell, in sampled steps only."""
        if self.at_once and isinstance(part, ExchangePart) and part.part in OF_WORKER:
            return True
        return any(isinstance(mark, ReplayedMark) for stretch in stretches for mark in stretch)

    def _count(self, part: str | ExchangePart, seconds: float) -> None:
        times = 1 + self._unread.pop(part, 0)
        if isinstance(part, ExchangePart):
            for _ in range(times):
                self.series[part].add(seconds)
            return
        self.totals[part] += seconds * times
        if part in EXCLUSIVE:
            self._taken["compute" if part == "data" else part] += seconds

    def _note(self, name: str, thread: str, start: Any, end: Any) -> None:
        timeline = self.timeline  # which another thread may end
        if timeline is not None:
            timeline.append(Span(name, thread, start, end))

    def read(self) -> dict[str | ExchangePart, float]:
        """Seconds so far per part; waits for the device."""
        if self._spans:
            torch.cuda.synchronize()
            self._read_over()
        for part in [part for part in self._unread if isinstance(part, ExchangePart) and part in self.series]:
            for _ in range(self._unread.pop(part)):  # as the last one that was read
                self.series[part].add(self.series[part].values[-1])
        return dict(self.totals)

    def own_seconds(self) -> float:
        """What the local workers compute in all, one after another, without stalls; waits for the device."""
        totals = self.read()
        measured = sum(totals.get(part, 0.0) for part in EXCLUSIVE if part != "exposed")
        return measured + totals.get("overlapped", 0.0) - self.steps.excess()

    def _read_over(self) -> None:
        """Count the spans that are over, in order, up to the first that is not; waits for nothing."""
        while self._spans and all(_event(end).query() for _, end in self._spans[0][1]):
            part, stretches = self._spans.popleft()
            if isinstance(part, StepEnd):
                self._keep(part)
            else:
                self._count(part, sum(self.between(start, end) for start, end in stretches))

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        totals = {part.name if isinstance(part, ExchangePart) else part: n for part, n in self.read().items()}
        series = {part.name: series.state_dict() for part, series in self.series.items()}
        return {"clock": {**totals, "series": series, "steps": self.steps.state_dict()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        totals = dict(state["clock"])
        series = totals.pop("series")
        self.steps.load_state_dict(totals.pop("steps"))
        self.series.update({ExchangePart.named(name): Series.from_state(kept) for name, kept in series.items()})
        self.totals.update({part_named(name): number for name, number in totals.items()})
        self._plans = list(dict.fromkeys(part.kind.plan for part in self.series if part.kind.plan))

    def events(self) -> list[dict[str, Any]]:
        """The timeline in the format of Chrome's traces, from its first span on; waits for the device."""
        spans = self.timeline or []
        if not spans:
            return []
        if self.cuda:
            torch.cuda.synchronize()
        origin = spans[0].start

        return [
            {
                "name": s.name,
                "ph": "X",
                "pid": 0,
                "tid": s.thread,
                "ts": 1e6 * self.between(origin, s.start),
                "dur": 1e6 * self.between(s.start, s.end),
            }
            for s in spans
        ]

    def exchanges(self) -> dict[ExchangeKind, tuple[int, float, float, list[Stage]]]:
        """Per kind of exchange: how many there were, when they were waited for (median, deviation), the buckets."""
        totals, found = self.read(), {}
        for kind in [key.kind for key in totals if isinstance(key, ExchangePart) and key.part == "count"]:
            stages: list[Stage] = []
            while ExchangePart(kind, "wire", len(stages)) in totals:
                stages.append(self._stage(kind, len(stages)))
            wait = ExchangePart(kind, "wait")
            found[kind] = int(totals[wait._replace(part="count")]), self._usual(wait), self._deviation(wait), stages
        return found

    def _stage(self, kind: ExchangeKind, bucket: int) -> Stage:
        """What the exchange of one bucket usually takes and sends."""

        def usual(part: str) -> float:
            return self._usual(ExchangePart(kind, part, bucket))

        made = [name for name in KINDS if ExchangePart(kind, f"{name}_wire", bucket) in self.totals]
        kinds = {name: (usual(f"{name}_wire"), usual(f"{name}_rounds")) for name in made}
        ready, encode, decode, wire, rounds = map(usual, OF_BUCKET)
        return Stage(ready, encode, decode, wire, rounds, kinds or None)

    def _usual(self, part: ExchangePart) -> float:
        """Median of what is timed; mean of what is counted."""
        if part in self.series:
            return self.series[part].median()
        series = self.series.get(part._replace(part="ready"))
        count = series.count if series else self.totals[ExchangePart(part.kind, "count")]
        return self.totals.get(part, 0.0) / count

    def _deviation(self, part: ExchangePart) -> float:
        """Of full batches, where there are any: the last batch of an epoch is shorter by nature."""
        full = part._replace(part="full_wait")
        timed = self.series.get(full, self.series.get(part))
        return timed.deviation() if timed else 0.0

    def columns(self, measures_comm: bool) -> dict[str, float | None]:
        """Time columns of a metrics row: `seconds` of training, its exclusive parts, and what exchanges took.

        `outlier_seconds_count` steps have taken three times what is usual or longer; `outlier_seconds` is what they
        took beyond it, which is in all measured columns and in no modelled one. Where several local workers compute at
        the same time, `overlapped_seconds` is what they would have taken longer one after another: estimated from
        sampled steps, in no measured column and in all modelled ones.

        Args:
            measures_comm: false where a process hosts several workers: no communication time can be measured then.
        """
        totals = self.read()
        parts: dict[str, float | None] = {f"{part}_seconds": totals.get(part, 0.0) for part in EXCLUSIVE + CONCURRENT}
        if not measures_comm:
            parts["comm_seconds"] = None
        steps, seconds = self.steps.outliers()
        return {
            "seconds": sum(totals.get(part, 0.0) for part in EXCLUSIVE),
            "outlier_seconds_count": steps,
            "outlier_seconds": seconds,
            **({"overlapped_seconds": totals.get("overlapped", 0.0)} if self.at_once else {}),
            **parts,
            "warmup_seconds": totals.get("warmup", 0.0),
        }


def _event(mark: Any) -> Any:
    """The CUDA event of a mark."""
    return mark.event if isinstance(mark, ReplayedMark) else mark
