"""Unsteady links: how long a collective takes where rates differ, messages come late and links fail.

A ring sends its bytes over all links at once, so that it goes at the rate of the slowest link of those who take part,
with rates B_w, and a round is over when the last of its A messages is there:

    seconds = max_w 8 max(0, wire - tokens_w) / B_w + rounds latency + sum over rounds of max_w delay_w

with what `Network` knows besides: kinds of collectives, machines of several workers (whose link has the tokens, and
spends them on what all of them send), trees. On top of it comes all the time in which a link of theirs is down.
Source: Thakur et al. 2005; Rényi 1953 (the largest of A exponential delays).
"""

import heapq
import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from accordion_bench.advising.disturbances import Disturbances, Outage
from accordion_bench.advising.random_steps import Array, generator
from accordion_bench.comm.clock import Stage
from accordion_bench.network.collective_costs import PAIRS
from accordion_bench.network.link_model import Network, harmonic

Workers = NDArray[np.bool_]  # whether each takes part


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
        """All workers behind the same link."""
        per_machine = self.network.workers_per_machine
        first = worker // per_machine * per_machine
        return slice(first, first + per_machine)

    def collectives(self, stage: Stage, begin: float, who: Workers) -> float:
        """When those of a bucket, which begin at one moment, are over for all who take part."""
        rate = self.bandwidth[who]
        carried = self.network.carried(stage, len(rate))
        tokens = np.minimum(self.network.burst, self._tokens[who] + (begin - self._idle_since[who]) * rate / 8)
        slowest = int(np.argmax(np.maximum(0.0, carried - tokens) / rate))
        network = self.network.at(float(rate[slowest]))
        network.jitter = self._jitter(stage, len(rate))
        self._outages = [outage for outage in self._outages if outage.at + outage.seconds > begin]
        end = self._with_outages(begin, network.of_bucket(stage, len(rate), float(tokens[slowest])), who)
        self._tokens[who] = np.maximum(0.0, tokens - carried)
        self._idle_since[who] = end
        return end

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
        self._made += 1
        if not self.network.jitter or not stage.rounds:
            return 0.0
        means = self.network.jitter / np.arange(1, workers + 1)
        late = float(generator(self.seed, "delays", self._made).gamma(stage.rounds, means).sum())
        counted = min(workers, 2) if set(stage.kinds or ()) == {PAIRS} else workers  # by `Network.seconds`
        return late / (stage.rounds * harmonic(counted))

    def _with_outages(self, begin: float, seconds: float, who: Workers) -> float:
        """When something is over that takes so many seconds in which the links of all who take part are up."""
        now, left = begin, seconds
        for outage in self._in_order():
            if outage.at >= now + left:
                break
            end = outage.at + outage.seconds
            if end > now and who[self._machine(outage.worker)].any():
                left -= max(0.0, outage.at - now)
                now = end
        return now + left

    def _in_order(self) -> Iterator[Outage]:
        """Outages as they begin, drawn as far as somebody looks."""
        for number in itertools.count():
            if number == len(self._outages):
                following = next(self._coming, None)
                if following is None:
                    return
                self._outages.append(following)
            yield self._outages[number]


def _at(outage: Outage) -> float:
    return outage.at


def _random(disturbances: Disturbances, machines: int, per_machine: int, seed: int) -> Iterator[Outage]:
    """Outages at random times, without end: Poisson processes of all links are one."""
    if not disturbances.outages_per_hour:
        return
    draws, at = generator(seed, "outages"), 0.0
    between = 3600 / (disturbances.outages_per_hour * machines)
    while True:
        at += draws.exponential(between)
        yield Outage(int(draws.integers(machines)) * per_machine, at, draws.exponential(disturbances.outage_seconds))
