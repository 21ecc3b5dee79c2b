"""Event simulation of data-parallel training with slow workers and link outages.

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accordion_bench.advising.advice import Interval
from accordion_bench.advising.disturbances import Array, Disturbances, RandomSteps, UnsteadyLinks, Workers, generator
from accordion_bench.advising.predict import MethodCost
from accordion_bench.advising.step_times import StepTimes
from accordion_bench.comm.clock import Stage
from accordion_bench.network.link_model import LEAST, Network, fair_rates
from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused

KEPT = 64  # steps whose random times are cached, for workers behind others


class WorkerThreads:
    """Exchange and compute thread of each worker in one step; methods advance the exchange threads.

    Args:
        begin: start time [A] of each worker's step.
        backward: seconds [A] of computation in it without contention.
        cores: cores per worker; infinity = nothing is shared.

    Attributes:
        now: time [A] of each exchange thread.
        backward_over: time [A] at which each worker's computation ends; infinity = not yet.
    """

    def __init__(self, begin: Array, backward: Array, cores: float = math.inf) -> None:
        self.now, self.cores = begin, cores
        self.left = backward  # remaining seconds of computation
        self.backward_over = np.where(backward > 0, math.inf, begin)

    def wait_for(self, left: Array | float) -> None:
        """Wait until at most this many seconds of computation remain."""
        rate = min(1.0, self.cores)
        self._pass(np.maximum(0.0, self.left - left) / rate, rate)

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
    """Result of a simulated run.

    Args:
        seconds: duration of each step, up to its end on the last participating worker; for a local method, the mean
            over the step's period; for an asynchronous method, the time in which each worker takes one step on average.
        exposed: seconds in which even the last worker waited for communication and codec, over all steps.
        waited: seconds [A] in which each worker waited for later workers.
        exchanges: number of exchanges.
        left_out: number [A] of exchanges without each worker.
    """

    seconds: Array
    exposed: float
    waited: Array
    exchanges: int
    left_out: NDArray[np.int64]

    @property
    def wall(self) -> float:
        """Duration of the run in seconds."""
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
    """Settings of a simulated run.

    Args:
        workers: A.
        steps: number of steps. A local method also exchanges after the last one.
        seed: random seed.
        quorum: number of workers that an exchange waits for without limit, as `sync.quorum`; null = all workers.
        grace: seconds to wait for the others after that, as `sync.grace`.
        cores: cores per worker, shared by computation, codecs and gloo; infinity = nothing is shared.
    """

    workers: int
    steps: int
    seed: int
    quorum: int | None = None
    grace: float = 0.0
    cores: float = math.inf

    def check(self, cost: MethodCost | None = None) -> None:
        """Check the settings.

        Args:
            cost: cost of the method; None = assume that it supports a quorum.

        Raises:
            ValueRefused: a value is invalid; the first one is reported.
        """
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
    """Simulate a run; equal arguments give equal results.

    Args:
        times: step of one worker alone.
        cost: cost of the method.
        network: links without disturbances.
        disturbances: slow workers, slow links and outages.
        run: workers, steps, seed, quorum and cores.

    Raises:
        ValueRefused: a value is invalid.
    """
    run.check(cost)
    disturbances.check(run.workers, network.workers_per_machine)
    pace = RandomSteps(times, disturbances, run.workers, run.seed)
    links = UnsteadyLinks(network, disturbances, run.workers, run.seed)
    if not cost.waits:
        return _at_own_pace(times, cost, pace, links, run)
    if not cost.local:
        return _every_step(times, cost, pace, links, run)
    if cost.beside:
        return _beside_local_steps(times, cost, pace, links, run)
    return _local_steps(times, cost, pace, links, run)


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
        draws = generator(run.seed, "partners", len(ends)).integers(1, workers, len(who))
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
    """Return the steps of each period of a run; the last period may be shorter."""
    return [range(first, min(first + period, steps)) for first in range(0, steps, period)]


def _work(period: range, times: StepTimes, cost: MethodCost, pace: RandomSteps) -> Array:
    """Return the seconds [A] that each worker computes in these local steps, if its cores are not shared."""
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
    """Exchange one ready bucket.

    Args:
        stage: the bucket.
        threads: threads of the workers; their times advance.
        slow: factor [A] of each worker's codec time.
        links: links of the workers.
        who: participating workers [A]; the times of the other threads are then meaningless.
        start: earliest start of the bucket's collectives.
    """
    threads.work(slow * stage.encode)
    begin = max(start, float(threads.now[who].max()))
    threads.wait_until(begin)
    seconds = links.collectives(stage, begin, who) - begin
    threads.work(seconds, min(1.0, links.network.processor_seconds(stage) / seconds) if seconds else 0.0)
    threads.wait_until(float(threads.now[who].max()))  # a collective ends when all participants have their part
    threads.work(slow * stage.decode)
