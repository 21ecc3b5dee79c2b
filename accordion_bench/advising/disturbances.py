"""Disturbances of a simulated run: slow workers, varying step times, slow links and link outages.

Random numbers of a step depend only on seed, step and worker.

A ring sends over all links at once, so the slowest link of the participating workers, with rates B_w, determines its
rate. A round ends when the last of its A messages has arrived:

    seconds = max_w 8 max(0, wire - tokens_w) / B_w + rounds latency + sum over rounds of max_w delay_w

Kinds of collectives, trees and machines of several workers are modelled as in `Network`; the tokens of a machine's link
are shared by its workers. The time in which a participating link is down is added.
Source: Thakur et al. 2005; Rényi 1953 (the largest of A exponential delays).
"""

import heapq
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accordion_bench.advising.step_times import StepTimes
from accordion_bench.comm.stages import Stage
from accordion_bench.network.collective_costs import PAIRS
from accordion_bench.network.link_model import Network, harmonic
from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused
from accordion_bench.tensors import keyed_rng

MOST_DOWN = 3.0  # mean number of links down at a time: an exchange of all workers then takes e^3 times as long


class Outage(NamedTuple):
    """Outage of a worker's link, `at` seconds after the start of the run."""

    worker: int
    at: float
    seconds: float


@dataclass(frozen=True)
class Disturbances:
    """Disturbances of a simulated run. By default only step times vary, as measured.

    Raises:
        ValueRefused: a number is out of range.
    """

    # standard deviation of the logarithm of step times, which are log-normal about their median; if small, about the
    # relative standard deviation of the steps. null = draw from the measured steps.
    spread: float | None = None
    # factor of the computing time by worker, for workers that are always slower
    slow: Mapping[int, float] = field(default_factory=dict)
    # bit/s by worker, for workers whose link differs from the network's
    slow_links: Mapping[int, float] = field(default_factory=dict)
    outages: Sequence[Outage] = ()  # given outages
    outages_per_hour: float = 0.0  # rate of random outages of each machine's link (a Poisson process)
    outage_seconds: float = 0.0  # mean duration of random outages, which is exponentially distributed

    def __post_init__(self) -> None:
        if self.spread is not None:
            checks.number("spread", self.spread, at_least=0, at_most=2, instead=0.1)
        for worker, factor in self.slow.items():
            checks.number(f"slow.{worker}", factor, above=0, instead=2.0)
        for worker, rate in self.slow_links.items():
            checks.number(f"slow_links.{worker}", rate, above=0, instead=2e7)
        for number, outage in enumerate(self.outages):
            checks.number(f"outages.{number}.at", outage.at, at_least=0, instead=10.0)
            checks.number(f"outages.{number}.seconds", outage.seconds, above=0, instead=5.0)
        checks.number("outages_per_hour", self.outages_per_hour, at_least=0, instead=1.0)
        checks.number("outage_seconds", self.outage_seconds, at_least=0, instead=30.0)
        if self.outages_per_hour and not self.outage_seconds:
            raise ValueRefused("outage_seconds", "above 0 where outages_per_hour is", self.outage_seconds, 30.0)

    def check(self, workers: int, per_machine: int) -> None:
        """Check the disturbances against the number of workers, `per_machine` of which share a link.

        Raises:
            ValueRefused: a worker or a link does not exist, or outages are so frequent that exchanges hardly ever end.
        """
        for key, found in self._named().items():
            for worker in found:
                if not isinstance(worker, int) or not 0 <= worker < workers:
                    raise ValueRefused(key, f"about workers from 0 to {workers - 1}", worker, workers - 1)
        links = -(-workers // per_machine)
        for key in ("slow_links", "outages", "outages_per_hour"):
            if links == 1 and (value := getattr(self, key)):
                raise ValueRefused(key, "left out where all workers are in one machine", value, type(value)())
        most = 3600 * MOST_DOWN / (links * self.outage_seconds) if self.outage_seconds else math.inf
        if self.outages_per_hour > most:
            each = f"{links} links fail for {self.outage_seconds:g} s each"
            rule = f"at most {most:.3g} where {each}, or exchanges hardly ever end"
            raise ValueRefused("outages_per_hour", rule, self.outages_per_hour, float(f"{most / 10:.1g}"))

    def _named(self) -> dict[str, Iterable[int]]:
        workers = [outage.worker for outage in self.outages]
        return {"slow": self.slow, "slow_links": self.slow_links, "outages": workers}


Array = NDArray[np.float64]  # one number per worker, unless stated otherwise


def generator(*parts: object) -> np.random.Generator:
    """Return a NumPy generator for one key; its draws are independent of those of other keys."""
    return np.random.default_rng(keyed_rng.key(*parts))


class RandomSteps:
    """Random duration of each worker's step, relative to the median of the measured steps.

    The draws of a worker do not depend on the number of workers. ValueRefused is raised if `spread` is null, and no
    step was measured.
    """

    def __init__(self, times: StepTimes, disturbances: Disturbances, workers: int, seed: int) -> None:
        self.spread, self.workers, self.seed = disturbances.spread, workers, seed
        if self.spread is None and not times.steps:
            raise ValueRefused("spread", "a number where no single step is timed", None, 0.1)
        self.measured = np.asarray(times.steps) / np.median(times.steps) if times.steps else np.ones(1)
        self.slow = np.ones(workers)  # constant factor [A] of each worker
        for worker, factor in disturbances.slow.items():
            self.slow[worker] = factor

    def factors(self, step: int) -> Array:
        """Return the factors [A] of one step."""
        if self.spread == 0:
            return self.slow
        draws = generator(self.seed, "step", step)
        if self.spread is None:
            chosen = draws.random(self.workers) * len(self.measured)
            return self.slow * self.measured[chosen.astype(np.int64)]
        return self.slow * np.exp(self.spread * draws.standard_normal(self.workers))


Workers = NDArray[np.bool_]  # whether each worker takes part
Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]  # workers, and the partner of each


class UnsteadyLinks:
    """Links of a run with their state over time: tokens and outages. Collectives run one after another.

    A worker's link is that of its machine.
    """

    def __init__(self, network: Network, disturbances: Disturbances, workers: int, seed: int) -> None:
        self.network, self.seed = network, seed
        self.bandwidth = np.full(workers, network.bandwidth)
        for worker, rate in disturbances.slow_links.items():
            self.bandwidth[self._machine(worker)] = rate
        self._tokens = np.full(workers, network.burst)
        self._idle_since = np.zeros(workers)
        self._made = 0  # collectives
        at = operator.attrgetter("at")
        machines = -(-workers // network.workers_per_machine)
        random = _random(disturbances, machines, network.workers_per_machine, seed)
        self._coming = heapq.merge(sorted(disturbances.outages, key=at), random, key=at)
        self._outages: list[Outage] = []  # drawn so far, without those that have ended

    def _machine(self, worker: int) -> slice:
        per_machine = self.network.workers_per_machine
        first = worker // per_machine * per_machine
        return slice(first, first + per_machine)

    def collectives(self, stage: Stage, begin: float, who: Workers) -> float:
        """Return the end of a bucket's collectives, started at `begin`, for all participating workers `who` [A]."""
        rate = self.bandwidth[who]
        carried = self.network.carried(stage, len(rate))
        tokens = np.minimum(self.network.burst, self._tokens[who] + (begin - self._idle_since[who]) * rate / 8)
        slowest = int(np.argmax(np.maximum(0.0, carried - tokens) / rate))
        network = self.network.at(float(rate[slowest]))
        network.jitter = self._jitter(stage, len(rate))
        seconds = network.of_bucket(stage, len(rate), float(tokens[slowest]))
        self._forget(begin)
        (end,) = self._with_outages(np.array([begin]), np.array([seconds]), lambda machine: who[machine].any())
        self._tokens[who] = np.maximum(0.0, tokens - carried)
        self._idle_since[who] = end
        return float(end)

    def meetings(self, stage: Stage, begin: Array, pairs: Pairs, earliest: float) -> Array:
        """Return the times at which pairs of workers, which start at `begin`, end their exchange of a bucket.

        `earliest` is a lower bound of the start time of all later collectives.
        """
        one, other = pairs
        rate, workers = np.minimum(self.bandwidth[one], self.bandwidth[other]), len(self.bandwidth)
        tokens = np.minimum(self.network.burst, self._tokens[one] + (begin - self._idle_since[one]) * rate / 8)
        alike, which = np.unique(np.stack([rate, tokens]), axis=1, return_inverse=True)
        steady = self.network.at(self.network.bandwidth)
        steady.jitter = 0.0
        taken = [steady.at(float(bits)).of_bucket(stage, workers, float(own)) for bits, own in alike.T]
        self._forget(earliest)
        end = self._with_outages(
            begin,
            np.asarray(taken)[which.ravel()] + self._late(stage, 2, len(one)),
            lambda machine: _in(machine, pairs),
        )
        self._tokens[one] = np.maximum(0.0, tokens - self.network.carried(stage, workers))
        self._idle_since[one] = end
        return end

    def _forget(self, before: float) -> None:
        self._outages = [outage for outage in self._outages if outage.at + outage.seconds > before]

    def reachable(self, at: Array) -> Array:
        """Return the earliest times [A], at or after `at` [A], at which each worker's link is up."""
        found = at.copy()
        for outage in self._in_order():
            if outage.at > found.max():
                break
            end = outage.at + outage.seconds
            caught = found[self._machine(outage.worker)]
            caught[(outage.at <= caught) & (caught < end)] = end
        return found

    def _jitter(self, stage: Stage, workers: int) -> float:
        """Return the mean delay per message with which `Network`'s formula yields a random delay of a bucket's rounds.

        The largest of A exponential delays of mean j is a sum of independent exponential numbers of means j, j/2, ...,
        j/A. The delay of R rounds is therefore a sum of A gamma-distributed numbers of shape R.
        """
        (late,) = self._late(stage, workers, 1)
        counted = min(workers, 2) if set(stage.kinds or ()) == {PAIRS} else workers  # by `Network.seconds`
        return float(late) / (stage.rounds * harmonic(counted)) if late else 0.0

    def _late(self, stage: Stage, workers: int, times: int) -> Array:
        """Return `times` random delays of all rounds of a bucket among so many workers."""
        self._made += 1
        if not self.network.jitter or not stage.rounds:
            return np.zeros(times)
        means = self.network.jitter / np.arange(1, workers + 1)
        draws: Array = generator(self.seed, "delays", self._made).gamma(stage.rounds, means, (times, workers))
        return draws.sum(axis=1)

    def _with_outages(self, begin: Array, seconds: Array, touches: Callable[[slice], Any]) -> Array:
        """Return the end times of exchanges, outages included.

        `touches` returns whether workers of a machine take part, as one value or one per exchange.
        """
        now, left = begin.copy(), seconds.copy()
        for outage in self._in_order():
            if (outage.at >= now + left).all():
                break
            end = outage.at + outage.seconds
            hit = (outage.at < now + left) & (end > now) & touches(self._machine(outage.worker))
            left = np.where(hit, left - np.maximum(0.0, outage.at - now), left)
            now = np.where(hit, end, now)
        return now + left

    def _in_order(self) -> Iterator[Outage]:
        """Yield outages in the order of their start; random outages are drawn on demand."""
        yield from self._outages
        for outage in self._coming:
            self._outages.append(outage)
            yield outage


def _in(machine: slice, pairs: Pairs) -> Workers:
    """Return, for each pair, whether one of its workers is in a machine."""
    inside = [(machine.start <= workers) & (workers < machine.stop) for workers in pairs]
    return inside[0] | inside[1]


def _random(disturbances: Disturbances, machines: int, per_machine: int, seed: int) -> Iterator[Outage]:
    """Yield random outages without end: the merged Poisson processes of all links."""
    if not disturbances.outages_per_hour:
        return
    draws, at = generator(seed, "outages"), 0.0
    between = 3600 / (disturbances.outages_per_hour * machines)
    while True:
        at += draws.exponential(between)
        yield Outage(int(draws.integers(machines)) * per_machine, at, draws.exponential(disturbances.outage_seconds))
