"""What differs among the workers of a run and from one step to the next: computing, and links.

Steps are drawn by random numbers that depend on seed, step and worker alone.

A ring sends its bytes over all links at once, so that it goes at the rate of the slowest link of those who take part,
with rates B_w, and a round is over when the last of its A messages is there:

    seconds = max_w 8 max(0, wire - tokens_w) / B_w + rounds latency + sum over rounds of max_w delay_w

with what `Network` knows besides: kinds of collectives, machines of several workers (whose link has the tokens, and
spends them on what all of them send), trees. On top of it comes all the time in which a link of theirs is down.
Source: Thakur et al. 2005; Rényi 1953 (the largest of A exponential delays).
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from accordion_bench.advising.step_times import StepTimes
from accordion_bench.comm.clock import Stage
from accordion_bench.network.collective_costs import PAIRS
from accordion_bench.network.link_model import Network, harmonic
from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused
from accordion_bench.tensors import keyed_rng

MOST_DOWN = 3.0  # links that are down on average: an exchange of all workers then takes e^3 times as long


class Outage(NamedTuple):
    """A link that carries nothing for a while.

    worker: whose.
    at: seconds after the start of the run.
    seconds: how long.
    """

    worker: int
    at: float
    seconds: float


@dataclass(frozen=True)
class Disturbances:
    """Disturbances of a simulated run; by default measured steps differ, and nothing else.

    Args:
        spread: standard deviation of the logarithm of a worker's steps, which are log-normal about their median; where
            it is small, that of the steps over their median. null = steps are drawn from the measured ones.
        slow: times as long as others, of workers that always compute slower.
        slow_links: bit/s, of workers whose link is not like the network's.
        outages: that are known beforehand.
        outages_per_hour: of each machine's link, at random times (a Poisson process).
        outage_seconds: mean length of those; they are exponentially distributed.

    Raises:
        ValueRefused: a number that cannot be.
    """

    spread: float | None = None
    slow: Mapping[int, float] = field(default_factory=dict)
    slow_links: Mapping[int, float] = field(default_factory=dict)
    outages: Sequence[Outage] = ()
    outages_per_hour: float = 0.0
    outage_seconds: float = 0.0

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
        """Refuse what so many workers cannot have.

        Args:
            workers: A.
            per_machine: G, that share a link.

        Raises:
            ValueRefused: a worker or a link that there is not, or so many outages that hardly an exchange would end.
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
        """Worker numbers by the option that names them."""
        return {
            "slow": self.slow,
            "slow_links": self.slow_links,
            "outages": [outage.worker for outage in self.outages],
        }


Array = NDArray[np.float64]  # a number for each worker, unless something else is said


def generator(*parts: object) -> np.random.Generator:
    """A generator of NumPy for one key; its draws are independent of all others."""
    return np.random.default_rng(keyed_rng.key(*parts))


class RandomSteps:
    """Draws how many times as long as the median step the step of each worker takes.

    Args:
        times: the measured steps, whose median stands for 1.
        disturbances: `spread` and `slow`.
        workers: A. The draws of a worker do not hang on how many others there are.
        seed: for draws.

    Attributes:
        slow: of each worker, what is the same in all its steps.

    Raises:
        ValueRefused: steps are to be drawn from measured ones, and none was measured.
    """

    def __init__(self, times: StepTimes, disturbances: Disturbances, workers: int, seed: int) -> None:
        self.spread, self.workers, self.seed = disturbances.spread, workers, seed
        if self.spread is None and not times.steps:
            raise ValueRefused("spread", "a number where no single step is timed", None, 0.1)
        self.measured = np.asarray(times.steps) / np.median(times.steps) if times.steps else np.ones(1)
        self.slow = np.ones(workers)
        for worker, factor in disturbances.slow.items():
            self.slow[worker] = factor

    def factors(self, step: int) -> Array:
        """Factors of one step, one for each worker."""
        if self.spread == 0:
            return self.slow
        draws = generator(self.seed, "step", step)
        if self.spread is None:
            chosen = draws.random(self.workers) * len(self.measured)
            return self.slow * self.measured[chosen.astype(np.int64)]
        return self.slow * np.exp(self.spread * draws.standard_normal(self.workers))


Workers = NDArray[np.bool_]  # whether each takes part
Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]  # workers, and whom each of them meets


class UnsteadyLinks:
    """The links of a run, as time goes by; collectives are made one after another.

    Args:
        network: what links have in common.
        disturbances: `slow_links` and outages; a worker's link is that of its machine.
        workers: A.
        seed: for draws.
    """

    def __init__(self, network: Network, disturbances: Disturbances, workers: int, seed: int) -> None:
        self.network, self.seed = network, seed
        self.bandwidth = np.full(workers, network.bandwidth)
        for worker, rate in disturbances.slow_links.items():
            self.bandwidth[self._machine(worker)] = rate
        self._tokens = np.full(workers, network.burst)
        self._idle_since = np.zeros(workers)
        self._made = 0  # collectives
        known = sorted(disturbances.outages, key=_at)
        machines = -(-workers // network.workers_per_machine)
        random = _random(disturbances, machines, network.workers_per_machine, seed)
        self._coming = heapq.merge(known, random, key=_at)
        self._outages: list[Outage] = []  # seen so far, without those that are over

    def _machine(self, worker: int) -> slice:
        """The workers that share the link of this one."""
        per_machine = self.network.workers_per_machine
        first = worker // per_machine * per_machine
        return slice(first, first + per_machine)

    def collectives(self, stage: Stage, begin: float, who: Workers) -> float:
        """When the collectives of a bucket, begun at one moment, are over for all workers that take part."""
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
        """When a bucket is exchanged by pairs, each of which begins at a moment of its own.

        Args:
            stage: the bucket.
            begin: of each.
            pairs: who meets whom.
            earliest: no collective begins before that any more.
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
        """Drop outages that are over by a moment."""
        self._outages = [outage for outage in self._outages if outage.at + outage.seconds > before]

    def reachable(self, at: Array) -> Array:
        """The first moments from `at` on at which each worker's link is up."""
        found = at.copy()
        for outage in self._in_order():
            if outage.at > found.max():
                break
            end = outage.at + outage.seconds
            caught = found[self._machine(outage.worker)]
            caught[(outage.at <= caught) & (caught < end)] = end
        return found

    def _jitter(self, stage: Stage, workers: int) -> float:
        """The mean delay of messages with which the formula gives what the rounds of a bucket are late by chance.

        The largest of A exponential delays of mean j is a sum of independent exponential numbers of means j, j/2, ...,
        j/A, so that R rounds are late by a sum of A gamma-distributed numbers of shape R.
        """
        (late,) = self._late(stage, workers, 1)
        counted = min(workers, 2) if set(stage.kinds or ()) == {PAIRS} else workers  # by `Network.seconds`
        return float(late) / (stage.rounds * harmonic(counted)) if late else 0.0

    def _late(self, stage: Stage, workers: int, times: int) -> Array:
        """Random delays of all rounds of a bucket, for so many buckets among so many workers each."""
        self._made += 1
        if not self.network.jitter or not stage.rounds:
            return np.zeros(times)
        means = self.network.jitter / np.arange(1, workers + 1)
        draws: Array = generator(self.seed, "delays", self._made).gamma(stage.rounds, means, (times, workers))
        return draws.sum(axis=1)

    def _with_outages(self, begin: Array, seconds: Array, touches: Callable[[slice], Any]) -> Array:
        """When exchanges end that need so many seconds with all their links up.

        Args:
            begin, seconds: of each.
            touches: whether workers of a machine take part, for all of them or for each.
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
        """Outages in the order in which they begin, drawn when they are asked for."""
        for number in itertools.count():
            if number == len(self._outages):
                following = next(self._coming, None)
                if following is None:
                    return
                self._outages.append(following)
            yield self._outages[number]


def _at(outage: Outage) -> float:
    return outage.at


def _in(machine: slice, pairs: Pairs) -> Workers:
    """Which pairs have a worker in a machine."""
    inside = [(machine.start <= workers) & (workers < machine.stop) for workers in pairs]
    return inside[0] | inside[1]


def _random(disturbances: Disturbances, machines: int, per_machine: int, seed: int) -> Iterator[Outage]:
    """Endless outages at random times: the Poisson processes of all links, merged into one."""
    if not disturbances.outages_per_hour:
        return
    draws, at = generator(seed, "outages"), 0.0
    between = 3600 / (disturbances.outages_per_hour * machines)
    while True:
        at += draws.exponential(between)
        yield Outage(int(draws.integers(machines)) * per_machine, at, draws.exponential(disturbances.outage_seconds))
