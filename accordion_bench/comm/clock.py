"""Time measurement: seconds of a run by part (computing, waiting, encoding, ...), step and bucket.

`lap(part)` adds the main thread's time since the last mark to `part`; these exclusive parts sum to the total. The time
of an exchange, on any thread, is split into encode, comm and decode by marks that `Comm` sets around its collectives.
The modelled clock takes medians of the times per bucket and of the parts of a step. On a GPU marks are CUDA events,
read once per epoch or when more than `UNREAD` are pending, so that measuring never synchronises with the device.

Each replay of a captured graph records the marks in it again. They are read in sampled steps only, one of `SAMPLED`, at
whose end the host synchronises; the values also count for the steps in between. If several local workers compute
concurrently, the time of one worker cannot be measured. In sampled steps they therefore compute one after another.
"""

import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from accordion_bench.comm.graphs import Graphs, ReplayedMark
from accordion_bench.comm.ledger import KINDS, Ledger
from accordion_bench.comm.samples import Phase, Series, Steps
from accordion_bench.comm.stages import EXCLUSIVE, ExchangeKind, ExchangePart, InForce, Stage, part_named

CONCURRENT = ("encode", "comm", "decode")
OF_BUCKET = ("ready", "encode", "decode", "wire", "rounds")
PLANS = 16  # largest number of plans that are distinguished
UNREAD = 10_000  # largest number of pending spans of a GPU
SAMPLED = 20  # one of so many steps is sampled
FIRST = 5  # number of the first sampled step: earlier ones run eagerly
OF_WORKER = ("ready", "wait", "full_wait")  # parts of exchanges that depend on the backward pass of one worker


class StepEnd(NamedTuple):
    """Marker in the queue of spans: the preceding spans belong to one step, or to the work between two steps."""

    phase: Phase
    sampled: bool


class Span(NamedTuple):
    """A stretch of time on one thread, for timelines."""

    name: str
    thread: str
    start: Any
    end: Any


class Clock:
    """Time measurement of one process."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.graphs = Graphs()
        self.warm = False  # whether warm-up is over; until then all time counts as warm-up
        self.at_once = False  # whether several local workers compute concurrently, except in sampled steps
        self.sampled = True
        # seconds per part; for exchanges, their number and the bytes and rounds of their buckets
        self.totals: dict[str | ExchangePart, float] = defaultdict(float)
        self.series: dict[ExchangePart, Series] = defaultdict(Series)  # seconds, one value per exchange
        self.steps = Steps()  # seconds by part, one value per step
        self.plan: InForce | None = None
        self.timeline: list[Span] | None = None  # recorded spans; None = spans are not recorded
        self._plans: list[InForce] = []
        self._events: set[str] = set()  # in the current step
        self._taken: dict[str, float] = defaultdict(float)  # seconds of the current step by part
        self._waits: list[tuple[ExchangeKind, tuple[Any, Any]]] = []  # in the current step
        self._spans: deque[tuple[str | ExchangePart | StepEnd, Sequence[tuple[Any, Any]]]] = deque()  # pending
        self._collectives: list[tuple[Any, Any]] | None = None  # of the current exchange
        self._ready: dict[int, tuple[Any, Any]] = {}  # of each bucket: start, ready
        self._noted: list[Callable[[], None]] | None = None  # calls that each replay of the work being captured makes
        self._unread: Counter[str | ExchangePart] = Counter()  # replays of a part since it was read
        self._begun = 0  # number of steps
        self._sampled_plans: set[InForce] = set()
        self._one_by_one = 1, 0.0  # samples and seconds of computing of the last sampled step
        self.start()

    def mark(self) -> Any:
        """Record a point in time: on the host, or on the stream of the device."""
        if not self.cuda:
            return time.perf_counter()
        if (replayed := self.graphs.mark()) is not None:
            return replayed
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Seconds between two completed marks."""
        return _event(start).elapsed_time(_event(end)) / 1000 if self.cuda else end - start

    @contextlib.contextmanager
    def deferred(self) -> Iterator[list[Callable[[], None]]]:
        """Collect the counting of the work being captured as a list of calls, which each replay of the graph makes."""
        again: list[Callable[[], None]] = []
        self._noted = again
        try:
            yield again
        finally:
            self._noted = self._collectives = None

    def _count_now(self, count: Callable[[], None]) -> None:
        """Make a call now, or at each replay if work is being captured."""
        if self._noted is None:
            count()
        else:
            self._noted.append(count)

    def start(self) -> None:
        """Restart measuring: time since the last lap (evaluation, writing) counts for no part."""
        self._last = self._step = self.mark()

    def lap(self, part: str) -> None:
        """Add the time since the last mark to `part`."""
        start, now = self._last, self.mark()
        self._last = now
        self._add(part if self.warm else "warmup", (start, now))
        self._note(part, "main", start, now)

    def in_force(self, batch_size: int, payload: int) -> None:
        """Start a step under a plan, see `InForce`. After `PLANS` different plans, a new one counts as the nearest."""
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
        """Note an event that does not occur in every step: steps are compared with those of the same events."""
        self._events.add(name)

    def step_over(self, samples: int = 0) -> None:
        """End a step with this number of samples of one worker; 0 = end the work between two steps."""
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
        """Replace the computing time of a step by that of workers which compute one after another, as last sampled."""
        taken, (samples, seconds) = self._taken["compute"], self._one_by_one
        if end.sampled or not seconds:
            self._one_by_one = end.phase.samples, taken
            return
        self._taken["compute"] = seconds * end.phase.samples / samples
        self.totals["overlapped"] += self._taken["compute"] - taken

    def worker(self) -> None:
        """Start the step of a local worker. Times at which buckets are ready are those of the last local worker."""
        self._step = self._last

    def ready(self, bucket: int) -> None:
        """Note that a bucket is ready. Other buckets count as ready when the main thread waits for them."""
        mark = self.mark()
        self._count_now(lambda: self._ready.update({bucket: (self._step, mark)}))

    def launched(self, buckets: int) -> Any:
        """Note that all buckets are launched now, from which time counts; return the mark to pass to `waits`."""
        self.event("launch")
        now = self.mark()
        self._ready = dict.fromkeys(range(buckets), (now, now))
        return now

    def waits(self, kind: ExchangeKind, since: Any = None) -> None:
        """Note that the main thread starts to wait for an exchange, or to run it; `since` is the mark of its launch."""
        self.event(kind.name)
        if self.warm:
            kind = kind._replace(plan=self.plan)
            stretch = self._step if since is None else since, self._last
            self._add(ExchangePart(kind, "wait"), stretch)
            self._waits.append((kind, stretch))
            self.totals[ExchangePart(kind, "count")] += 1

    @contextlib.contextmanager
    def exchanging(self, kind: ExchangeKind, bucket: int, ledger: Ledger) -> Iterator[None]:
        """Measure the exchange of one bucket, on the thread that runs it.

        Its bytes are divided by the number of workers of its kind, late ones included, as in the ledger of the run.
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
        else:  # each replay has its own mark
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
        """Return the mark from which time counts for a bucket, and that at which it was ready; default: now."""
        ready = self._ready.pop(bucket, None) if self._noted is None else None
        return ready or (self._step, self._last)

    def collective(self, start: Any) -> None:
        """Note the end of a collective that started at `start`."""
        if self._collectives is not None:
            self._collectives.append((start, self.mark()))
        elif self.warm:  # outside of exchanges: an exact average, buffers
            self._add("comm", (start, self.mark()))

    def _add(self, part: str | ExchangePart, *stretches: tuple[Any, Any]) -> None:
        """Add intervals of one part; their sum is one value of its series."""
        if self._noted is not None:
            self._noted.append(lambda: self._add(part, *stretches))
        elif not self.sampled and self._only_sampled(part, stretches):
            self._unread[part] += 1
        elif not self.cuda:
            self._count(part, sum(end - start for start, end in stretches))
        else:
            self._spans.append((part, stretches))

    def _only_sampled(self, part: str | ExchangePart, stretches: Sequence[tuple[Any, Any]]) -> bool:
        """Whether a part is read, or is meaningful, in sampled steps only."""
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
        timeline = self.timeline  # another thread may set it to None
        if timeline is not None:
            timeline.append(Span(name, thread, start, end))

    def read(self) -> dict[str | ExchangePart, float]:
        """Return seconds per part so far; synchronises with the device."""
        if self._spans:
            torch.cuda.synchronize()
            self._read_over()
        for part in [part for part in self._unread if isinstance(part, ExchangePart) and part in self.series]:
            for _ in range(self._unread.pop(part)):  # repeat the last value that was read
                self.series[part].add(self.series[part].values[-1])
        return dict(self.totals)

    def own_seconds(self) -> float:
        """Computing seconds of all local workers, one after another, without outliers; synchronises with the device."""
        totals = self.read()
        measured = sum(totals.get(part, 0.0) for part in EXCLUSIVE if part != "exposed")
        return measured + totals.get("overlapped", 0.0) - self.steps.excess()

    def _read_over(self) -> None:
        """Count completed spans in order, up to the first that is pending; does not block."""
        while self._spans and all(_event(end).query() for _, end in self._spans[0][1]):
            part, stretches = self._spans.popleft()
            if isinstance(part, StepEnd):
                self._keep(part)
            else:
                self._count(part, sum(self.between(start, end) for start, end in stretches))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
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

    def raise_totals_to_row(self, row: Mapping[str, Any]) -> None:
        """Raise the totals to the seconds of a metrics row of another process, so that later rows do not fall below."""
        for part in (*EXCLUSIVE, *CONCURRENT, "warmup", "overlapped"):
            self.totals[part] = max(self.totals[part], row.get(f"{part}_seconds") or 0.0)

    def events(self) -> list[dict[str, Any]]:
        """Return the timeline as Chrome trace events, relative to its first span; synchronises with the device."""
        spans = self.timeline or []
        if not spans:
            return []
        if self.cuda:
            torch.cuda.synchronize()
        rows = []
        for name, thread, start, end in spans:
            times = {"ts": 1e6 * self.between(spans[0].start, start), "dur": 1e6 * self.between(start, end)}
            rows.append({"name": name, "ph": "X", "pid": 0, "tid": thread, **times})
        return rows

    def exchanges(self) -> dict[ExchangeKind, tuple[int, float, float, list[Stage]]]:
        """Return per kind of exchange: count, median and deviation of the time until the wait, and the buckets."""
        totals, found = self.read(), {}
        for kind in [key.kind for key in totals if isinstance(key, ExchangePart) and key.part == "count"]:
            stages: list[Stage] = []
            while ExchangePart(kind, "wire", len(stages)) in totals:
                stages.append(self._stage(kind, len(stages)))
            wait = ExchangePart(kind, "wait")
            found[kind] = int(totals[wait._replace(part="count")]), self._usual(wait), self._deviation(wait), stages
        return found

    def _stage(self, kind: ExchangeKind, bucket: int) -> Stage:

        def usual(part: str) -> float:
            return self._usual(ExchangePart(kind, part, bucket))

        made = [name for name in KINDS if ExchangePart(kind, f"{name}_wire", bucket) in self.totals]
        kinds = {name: (usual(f"{name}_wire"), usual(f"{name}_rounds")) for name in made}
        ready, encode, decode, wire, rounds = map(usual, OF_BUCKET)
        return Stage(ready, encode, decode, wire, rounds, kinds or None)

    def _usual(self, part: ExchangePart) -> float:
        if part in self.series:
            return self.series[part].median()
        series = self.series.get(part._replace(part="ready"))
        count = series.count if series else self.totals[ExchangePart(part.kind, "count")]
        return self.totals.get(part, 0.0) / count

    def _deviation(self, part: ExchangePart) -> float:
        """Deviation over steps with a full batch, if there are any: the last batch of an epoch may be smaller."""
        full = part._replace(part="full_wait")
        timed = self.series.get(full, self.series.get(part))
        return timed.deviation() if timed else 0.0

    def columns(self, measures_comm: bool) -> dict[str, float | None]:
        """Return the time columns of a metrics row: `seconds` of training, its exclusive parts, and those of exchanges.

        `outlier_seconds_count` is the number of steps that took at least three times the usual time;
        `outlier_seconds` is their excess, which is part of all measured columns and of no modelled one. If several
        local workers compute concurrently, `overlapped_seconds` is the time that this saved, estimated from sampled
        steps; it is part of all modelled columns and of no measured one. Communication time cannot be measured if a
        process hosts several workers.
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
    return mark.event if isinstance(mark, ReplayedMark) else mark
