"""Option `--simulate` of the advice: event simulation of training with slow workers and link outages.

Step times are random. In a step t_w times as long as the median, worker w starts at b_w. For bucket k:

    ready_kw  = b_w + t_w ready_k
    at_kw     = max(ready_kw, end_(k-1)w) + encode_k        needs no other worker
    start_k   = max_w at_kw                                 a collective waits for the last worker
    end_kw    = start_k + comm_k + decode_k                 comm_k by `UnsteadyLinks`
    b_w      <- max(b_w + t_w backward_end, end_last,w) + t_w update

With less than two cores per worker, computation and exchange slow each other down (`WorkerThreads`).

Workers of a local method take H steps and then exchange one bucket after another, starting at max_w b_w. With a quorum
Q the exchange proceeds without the last workers:

    start = min(max_w b_w, max(the Q-th smallest b_w, the smallest b_w of the last exchange) + grace)

because one participant must know the last consensus. A worker that has not finished its H steps by then continues, and
takes part in the next exchange after it has. Every worker takes all steps of the run, and at the end all wait for all.
An exchange that overlaps with local steps starts with the next H steps. Workers wait for it at their end, or after its
delay.

Workers of an asynchronous method (AD-PSGD) do not wait. During each step a worker sends to a random other worker at the
rate of the slower of both links. The run ends after `workers x steps` steps in total, whichever workers take them.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accordion_bench.advising.advice import Advice, AdviceRow, Interval
from accordion_bench.advising.cluster import Cluster
from accordion_bench.advising.disturbances import Array, Disturbances, Outage, RandomSteps, UnsteadyLinks, Workers
from accordion_bench.advising.disturbances import generator as numpy_generator
from accordion_bench.advising.predict import MethodCost
from accordion_bench.advising.step_times import StepTimes
from accordion_bench.advising.verdict import BASELINES
from accordion_bench.comm.stages import Stage
from accordion_bench.network.link_model import LEAST, Network, fair_rates
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.units import rate

FASTEST = 3  # simulated methods with and without local steps each, in addition to the baselines
STEPS = 200  # usual number of simulated steps
NUMBER = r"(\d+(?:\.\d+)?)"
KEPT = 64  # steps whose random times are cached, for workers behind others


class WorkerThreads:
    """Exchange and compute thread of each worker in one step; methods advance the exchange threads.

    Steps start at `begin` [A], with `backward` seconds [A] of computation without contention.
    """

    def __init__(self, begin: Array, backward: Array, cores: float = math.inf) -> None:
        self.now, self.cores = begin, cores  # time [A] of each exchange thread; cores per worker
        self.left = backward  # remaining seconds of computation
        self.backward_over = np.where(backward > 0, math.inf, begin)  # end [A] of each computation; infinity = not yet

    def wait_for(self, left: Array | float) -> None:
        """Wait until at most this many seconds of computation remain."""
        pace = min(1.0, self.cores)
        self._pass(np.maximum(0.0, self.left - left) / pace, pace)

    def wait_until(self, then: float) -> None:
        """Wait until this time."""
        self._pass(np.maximum(0.0, then - self.now), min(1.0, self.cores))

    def work(self, seconds: Array | float, demand: Array | float = 1.0) -> None:
        """Work in the exchange thread, for this many seconds without contention, on `demand` cores."""
        rates: Callable[..., Any] = fair_rates if np.ndim(demand) == 0 else np.vectorize(fair_rates)
        computing, exchanging = rates(1.0, demand, self.cores)
        _, alone = rates(0.0, demand, self.cores)
        together = np.minimum(seconds / exchanging, self.left / computing)
        self._pass(together, computing)
        self.now = self.now + np.maximum(0.0, seconds - exchanging * together) / alone

    def _pass(self, lasts: Array, rate: Array | float) -> None:
        """Advance time by `lasts` seconds, with compute threads at this rate; 1 = without contention."""
        needed = self.left / rate
        ends = (needed <= lasts) & (self.left > 0)
        self.backward_over = np.where(ends, self.now + needed, self.backward_over)
        self.left = np.where(needed <= lasts, 0.0, self.left - rate * lasts)
        self.now = self.now + lasts


@dataclass(frozen=True)
class Simulated:
    """Result of a run."""

    # duration of each step, up to its end on the last participating worker; for a local method, the mean over the
    # step's period; for an asynchronous method, the time in which each worker takes one step on average
    seconds: Array
    exposed: float  # seconds in which even the last worker waited for communication and codec, over all steps
    waited: Array  # seconds [A] in which each worker waited for later workers
    exchanges: int  # number of exchanges
    left_out: NDArray[np.int64]  # number [A] of exchanges without each worker

    @property
    def wall(self) -> float:
        """Seconds of the run."""
        return float(self.seconds.sum())

    @property
    def step(self) -> Interval:
        """Median step time, with the interval that contains 95 % of the steps."""
        low, median, high = np.percentile(self.seconds, [2.5, 50, 97.5]).tolist()
        return Interval(median, low, high)

    @property
    def exposed_share(self) -> float:
        """Exposed time as a fraction of the run's duration."""
        return self.exposed / self.wall

    @property
    def waiting_share(self) -> float:
        """Mean fraction of the run's duration in which workers waited for later ones."""
        return float(self.waited.mean()) / self.wall


@dataclass(frozen=True)
class SimulatedRun:
    """Settings of a simulated run."""

    workers: int  # A
    steps: int  # number of steps. A local method also exchanges after the last one.
    seed: int  # random seed
    # number of workers that an exchange waits for without limit, as `sync.quorum`; null = all workers
    quorum: int | None = None
    grace: float = 0.0  # seconds to wait for the others after that, as `sync.grace`
    cores: float = math.inf  # cores per worker, shared by computation, codecs and gloo; infinity = nothing is shared

    def check(self, cost: MethodCost | None = None) -> None:
        """Raise ValueRefused for the first invalid value; without a method's cost, assume that it supports a quorum."""
        checks.integer("workers", self.workers, at_least=2)
        checks.integer("steps", self.steps, at_least=1, instead=200)
        checks.integer("seed", self.seed, at_least=0)
        if self.quorum is not None:
            checks.integer("sync.quorum", self.quorum, at_least=1, at_most=self.workers, instead=self.workers)
            if cost is not None and not cost.quorum:
                rule = f"{{null}} with {cost.name}, of which no worker may be late"
                raise ValueRefused("sync.quorum", rule, self.quorum, None)
        if not self.cores > 0:
            raise ValueRefused("cores", "above 0", self.cores, 1.0)
        checks.number("sync.grace", self.grace, at_least=0, instead=0.5)
        if self.grace and self.quorum is None:
            raise ValueRefused("sync.grace", "0 without a quorum, where all are waited for", self.grace, 0)


def simulate(
    times: StepTimes, cost: MethodCost, network: Network, disturbances: Disturbances, run: SimulatedRun
) -> Simulated:
    """Simulate a run with these disturbances; equal arguments give equal results. ValueRefused if one is invalid."""
    run.check(cost)
    disturbances.check(run.workers, network.workers_per_machine)
    pace = RandomSteps(times, disturbances, run.workers, run.seed)
    links = UnsteadyLinks(network, disturbances, run.workers, run.seed)
    if not cost.waits:
        way = _at_own_pace
    elif cost.local:
        way = _beside_local_steps if cost.beside else _local_steps
    else:
        way = _every_step
    return way(times, cost, pace, links, run)


def _every_step(
    times: StepTimes, cost: MethodCost, pace: RandomSteps, links: UnsteadyLinks, run: SimulatedRun
) -> Simulated:
    workers, slowdown = pace.workers, max(1.0, 1.0 / run.cores)
    ready = times.ready if cost.overlaps else [times.backward_end] * len(times.ready)
    stages, everyone = cost.stages(ready, workers), np.ones(workers, dtype=bool)
    begin, waited, exposed, ends = np.zeros(workers), np.zeros(workers), 0.0, [0.0]
    for step in range(run.steps):
        factors = pace.factors(step)
        threads = WorkerThreads(begin, factors * times.backward_end, run.cores)
        for stage in stages:
            threads.wait_for(factors * (times.backward_end - stage.ready))
            _exchange(stage, threads, pace.slow, links, everyone)
        threads.wait_for(0.0)
        idle = threads.now - threads.backward_over
        exposed += float(idle.min())
        waited += idle - idle.min()
        begin = threads.now + slowdown * np.maximum(0.0, factors * times.update + pace.slow * cost.extra)
        ends.append(float(begin.max()))
    return Simulated(np.diff(ends), exposed, waited, run.steps, np.zeros(workers, dtype=np.int64))


def _local_steps(
    times: StepTimes, cost: MethodCost, pace: RandomSteps, links: UnsteadyLinks, run: SimulatedRun
) -> Simulated:
    workers, slowdown = pace.workers, max(1.0, 1.0 / run.cores)
    needed = workers if run.quorum is None else run.quorum
    who, received, arrived = np.ones(workers, dtype=bool), np.zeros(workers), np.zeros(workers)
    waited, left_out, exposed, ends = np.zeros(workers), np.zeros(workers, dtype=np.int64), 0.0, [0.0]
    missing, periods = np.zeros(workers), _periods(run.steps, cost.period)  # missing: seconds of later steps
    for period in periods:
        work = slowdown * _work(period, times, cost, pace)
        missing[~who] += work[~who]
        computed = received + work
        arrived = np.where(who, links.reachable(computed), arrived)  # the others are still in an earlier period
        enough = float(np.partition(arrived, needed - 1)[needed - 1])
        enough = max(enough, float(arrived[who].min()))  # one participant must know the last consensus
        start = max(ends[-1], min(float(arrived.max()), enough + run.grace))
        who = arrived <= start
        threads = WorkerThreads(arrived, np.zeros(workers), run.cores)
        for stage in cost.stages([0.0] * len(times.ready), int(who.sum())):
            _exchange(stage, threads, pace.slow, links, who, start)
        received = threads.now
        idle = (received - arrived)[who]
        exposed += float(idle.min())
        waited[who] += idle - idle.min()
        left_out += ~who
        ends.append(float(received[who].max()))
    over = np.where(who, received, arrived) + missing
    waited += over.max() - over
    ends[-1] = float(over.max())
    return Simulated(_by_step(ends, periods), exposed, waited, len(periods), left_out)


def _beside_local_steps(
    times: StepTimes, cost: MethodCost, pace: RandomSteps, links: UnsteadyLinks, run: SimulatedRun
) -> Simulated:
    workers, everyone = pace.workers, np.ones(pace.workers, dtype=bool)
    exchanges = cost.exchanges(cost.stages([0.0] * len(times.ready), workers))
    begin, waited, exposed, ends = np.zeros(workers), np.zeros(workers), 0.0, [0.0]
    rounds = _periods(run.steps, round(cost.between))
    stretches: list[tuple[range, list[Stage]]] = []
    for number, own in enumerate(rounds):
        cut = round(cost.beside)
        stretches.append((own[:cut], exchanges[(number - 1) % len(exchanges)] if number else []))
        stretches += [(own[cut:], [])] if own[cut:] else []
    last = exchanges[(len(rounds) - 1) % len(exchanges)]  # overlaps with no steps
    for stretch, stages in [*stretches, (range(0), last)]:
        threads = WorkerThreads(begin, _work(stretch, times, cost, pace), run.cores)
        for stage in stages:
            _exchange(stage, threads, pace.slow, links, everyone)
        threads.wait_for(0.0)
        idle = threads.now - threads.backward_over
        exposed += float(idle.min())
        waited += idle - idle.min()
        begin = threads.now
        ends.append(float(begin.max()))
    ends[-2:] = ends[-1:]
    taken = _by_step(ends, [stretch for stretch, _ in stretches])
    return Simulated(taken, exposed, waited, len(rounds), np.zeros(workers, dtype=np.int64))


def _at_own_pace(
    times: StepTimes, cost: MethodCost, pace: RandomSteps, links: UnsteadyLinks, run: SimulatedRun
) -> Simulated:
    workers, network = pace.workers, links.network
    stages = cost.stages([0.0] * len(times.ready), workers)
    now, taken, over = np.zeros(workers), np.zeros(workers, dtype=np.int64), math.inf
    ends, idle = [np.zeros(0)], [np.zeros(0)]  # of each step of any worker
    work_of = functools.lru_cache(KEPT)(lambda number: _work(range(number, number + 1), times, cost, pace))
    while (who := np.flatnonzero(now < over)).size:
        draws = numpy_generator(run.seed, "partners", len(ends)).integers(1, workers, len(who))
        pairs = who, (who + draws) % workers
        work = np.array([work_of(number)[worker] for number, worker in zip(taken[who], who, strict=True)])
        threads = WorkerThreads(now[who], work, run.cores)
        for stage in stages:
            threads.work(pace.slow[who] * stage.encode)
            seconds = links.meetings(stage, threads.now, pairs, float(now.min())) - threads.now
            threads.work(seconds, np.minimum(1.0, network.processor_seconds(stage) / np.maximum(seconds, LEAST)))
            threads.work(pace.slow[who] * stage.decode)
        threads.wait_for(0.0)
        now[who] = threads.now
        taken[who] += 1
        ends.append(threads.now)
        idle.append(threads.now - threads.backward_over)
        if taken.sum() >= workers * run.steps:
            over = float(np.partition(np.concatenate(ends), workers * run.steps - 1)[workers * run.steps - 1])
    in_order = np.argsort(np.concatenate(ends), kind="stable")[: workers * run.steps]
    exposed = float(np.concatenate(idle)[in_order].sum()) / workers
    seconds = np.diff(np.concatenate(ends)[in_order][workers - 1 :: workers], prepend=0.0)
    return Simulated(seconds, exposed, np.zeros(workers), run.steps, np.zeros(workers, dtype=np.int64))


def _periods(steps: int, period: int) -> list[range]:
    return [range(first, min(first + period, steps)) for first in range(0, steps, period)]


def _work(period: range, times: StepTimes, cost: MethodCost, pace: RandomSteps) -> Array:
    found = np.zeros(pace.workers)
    for step in period:
        factors = pace.factors(step)
        found += factors * times.backward_end + np.maximum(0.0, factors * times.update + pace.slow * cost.extra)
    return found


def _by_step(ends: list[float], periods: list[range]) -> Array:
    lengths = [len(period) for period in periods]
    return np.repeat(np.diff(ends) / lengths, lengths)


def _exchange(
    stage: Stage, threads: WorkerThreads, slow: Array, links: UnsteadyLinks, who: Workers, start: float = 0.0
) -> None:
    """Exchange one ready bucket; the times of all threads advance, and those of absent workers are meaningless.

    Args:
        slow: factor [A] of each worker's codec time.
        who: participating workers [A].
        start: earliest start of the bucket's collectives.
    """
    threads.work(slow * stage.encode)
    begin = max(start, float(threads.now[who].max()))
    threads.wait_until(begin)
    seconds = links.collectives(stage, begin, who) - begin
    threads.work(seconds, min(1.0, links.network.processor_seconds(stage) / seconds) if seconds else 0.0)
    threads.wait_until(float(threads.now[who].max()))  # a collective ends when all participants have their part
    threads.work(slow * stage.decode)


class Late(NamedTuple):
    """Simulated run of one method, with its row of the advice, which is without disturbances."""

    row: AdviceRow
    found: Simulated

    def flat(self) -> dict[str, Any]:
        """Return the result as columns."""
        found = self.found
        return {
            "method": self.row.method,
            **{f"step{key}": value for key, value in zip(("", "_low", "_high"), found.step, strict=True)},
            **{key: getattr(found, key) for key in ("wall", "exposed_share", "waiting_share", "exchanges")},
            "left_out": found.left_out.tolist() if len(found.left_out) <= 100 else int(found.left_out.sum()),
        }


class Wanted:
    """Simulation requested by --simulate.

    Args:
        words: `slow=3:2.0` (worker 3 takes twice as long), `slow_links=2:20mbit` and `outages=1:5s@10s` (worker 1's
            link is down for 5 s, starting 10 s after the start), each any number of times; `outages_per_hour=1
            outage_seconds=30`, `spread=0.1`, `sync.quorum=3 sync.grace=0.5` (for methods with these options), and
            `steps=200 seed=0`.

    Raises:
        ConfigError: a word has another form, or its value is invalid.
    """

    def __init__(self, words: Sequence[str]) -> None:
        slow: dict[int, float] = {}
        links: dict[int, float] = {}
        outages: list[Outage] = []
        plain: dict[str, float] = {}
        for word in words:
            key, _, value = word.partition("=")
            if key == "slow":
                worker, factor = _of_worker(key, value, f"3:{2.0}")
                slow[worker] = _number(key, factor, "3:2.0")
            elif key == "slow_links":
                worker, speed = _of_worker(key, value, "2:20mbit")
                bits = rate(speed)
                if bits is None:
                    raise ValueRefused("slow_links", "WORKER:RATE, with RATE like 20mbit", value, f"{worker}:20mbit")
                links[worker] = bits
            elif key == "outages":
                outages.append(_outage(value))
            else:
                plain[key] = _number(key, value, {"steps": "200", "seed": "0", "sync.quorum": "2"}.get(key, "1"))
        steps, seed = (_whole(key, plain.pop(key, usual)) for key, usual in (("steps", STEPS), ("seed", 0)))
        quorum = _whole("sync.quorum", plain.pop("sync.quorum")) if "sync.quorum" in plain else None
        self.settings = SimulatedRun(0, steps, seed, quorum, plain.pop("sync.grace", 0.0))
        self.disturbances = Disturbances(slow=slow, slow_links=links, outages=outages, **plain)

    def check(self, workers: int, per_machine: int) -> None:
        """Raise ValueRefused for the first value that is invalid for A workers, `per_machine` of which share a link."""
        self.disturbances.check(workers, per_machine)
        replace(self.settings, workers=workers).check()

    def run(self, times: StepTimes, costs: Sequence[MethodCost], cluster: Cluster, advice: Advice) -> list[Late]:
        """Simulate the baselines and the fastest methods of the advice."""
        every_step, local = ([row for row in advice.rows if row.local == wanted] for wanted in (False, True))
        chosen = {row.method for row in (*every_step[:FASTEST], *local[:FASTEST])} | set(BASELINES)
        by_name = {cost.name: cost for cost in costs}
        return [
            Late(row, self._simulated(times, replace(by_name[row.method], period=row.period), cluster))
            for row in advice.rows
            if row.method in chosen
        ]

    def _simulated(self, times: StepTimes, cost: MethodCost, cluster: Cluster) -> Simulated:
        run = replace(self.settings, workers=cluster.workers, cores=cluster.cores)
        run = run if cost.quorum else replace(run, quorum=None, grace=0.0)
        return simulate(times, cost, cluster.network, self.disturbances, run)


def _of_worker(key: str, value: str, instead: str) -> tuple[int, str]:
    worker, colon, rest = value.partition(":")
    if not colon or not worker.isdigit():
        raise ValueRefused(key, "WORKER:VALUE", value, instead)
    return int(worker), rest


def _outage(value: str) -> Outage:
    worker, rest = _of_worker("outages", value, "1:5s@10s")
    found = re.fullmatch(f"{NUMBER}s@{NUMBER}s", rest)
    if found is None:
        raise ValueRefused("outages", "WORKER:SECONDSs@ATs", value, f"{worker}:5s@10s")
    return Outage(worker, at=float(found[2]), seconds=float(found[1]))


def _number(key: str, text: str, instead: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueRefused(key, "a number", text or "nothing", instead) from None


def _whole(key: str, number: float) -> int:
    if not float(number).is_integer():
        instead = round(number) if math.isfinite(number) else 1
        raise ConfigError(f"{key} must be a whole number, got {number:g}; type {key}={instead}")
    return int(number)
