"""A step of one method on one cluster: when communication ends, and what of it nothing hides."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from accordion_bench.advising.method_cost import MethodCost
from accordion_bench.advising.step_times import StepTimes
from accordion_bench.comm.clock import Stage
from accordion_bench.comm.samples import Series
from accordion_bench.network.link_model import Network, largest_of, step_ends

HIDDEN = 0.05  # of a step, below which what is exposed of a local method counts as little
LONGEST = 2**14  # steps of a period that is looked for


@dataclass(frozen=True)
class Cluster:
    """Where a step runs.

    Args:
        network: its links.
        workers: A.
        cores: for each worker, which computing, codecs and gloo share; infinity = nothing is shared.
    """

    network: Network
    workers: int
    cores: float = math.inf

    @property
    def slowdown(self) -> float:
        """How many times as long computing takes where workers share a core; 1 = each has one."""
        return max(1.0, 1.0 / self.cores)

    def at(self, bandwidth: float) -> "Cluster":
        """With other links between machines."""
        return replace(self, network=self.network.at(bandwidth))


class Step(NamedTuple):
    """Seconds of a step; of a local method, means over a period.

    seconds: in all.
    exposed: what communication, with its codec, adds to computing, of workers that share a core to their turns at it.
    """

    seconds: float
    exposed: float


def step(times: StepTimes, cost: MethodCost, cluster: Cluster) -> Step:
    """What a step takes.

        exchanged in every step    max(backward, end) + update + extra
        every H local steps        backward + update + extra + end / H
        and beside the next H      max(H (backward + update + extra), end) / H
        beside the next tau < H    as both: max(tau (backward + update + extra), end) / H + the other steps

    `end` is that of the last bucket (docs/network.md). Buckets begin when the last worker has them ready, e_A standard
    deviations of a step later than the mean one; after H local steps, sqrt(H) times as late. Where a period has several
    exchanges, of some tensors each, they are added, and H is the steps from one to the next. Of
    workers that meet in pairs, the later one of two counts. A burst comes back only while the link is idle, so that no
    step is shorter than what the link alone takes for its bytes without one.

    Args:
        times: of one worker alone.
        cost: of the method.
        cluster: where it runs.
    """
    slowdown = cluster.slowdown
    late = Series(times.steps).deviation() * largest_of(min(cluster.workers, 2) if cost.in_pairs else cluster.workers)
    if cost.local:
        late *= math.sqrt(cost.between)
        buckets = cost.stages([late] * len(times.specs), cluster.workers)
        own = times.backward_end + max(0.0, times.update + cost.extra)
        ends = [
            max(step_ends(cluster.network, part, cluster.workers, cost.beside * own, cluster.cores))
            for part in cost.exchanges(buckets)
        ]
        seconds = sum(ends) / cost.period + slowdown * own * ((cost.between - cost.beside) / cost.between)
        seconds = max(seconds, _least(cluster, buckets) / cost.period)
        return Step(seconds, seconds - slowdown * times.compute)
    ready = [(seconds if cost.overlaps else times.backward_end) + late for seconds in times.ready]
    buckets = cost.stages(ready, cluster.workers)
    backward, end = step_ends(cluster.network, buckets, cluster.workers, times.backward_end, cluster.cores)
    seconds = max(backward, end) + slowdown * max(0.0, times.update + cost.extra)
    seconds = max(seconds, _least(cluster, buckets))
    return Step(seconds, seconds - slowdown * times.compute)


def _least(cluster: Cluster, buckets: Sequence[Stage]) -> float:
    """Seconds that links with a burst take for buckets when none of it is left."""
    if not cluster.network.burst:
        return 0.0
    return math.fsum(cluster.network.of_bucket(bucket, cluster.workers) for bucket in buckets)


def shortest_period(times: StepTimes, cost: MethodCost, cluster: Cluster) -> MethodCost:
    """The local method with the shortest period of which less than 5 % of a step is exposed, or with the longest."""
    each = max(1, len(cost.parts))  # a period has as many steps between all exchanges

    def hides(between: int) -> bool:
        if cost.delay is not None and between <= cost.delay:
            return False
        taken = step(times, replace(cost, period=each * between), cluster)
        return taken.exposed < HIDDEN * taken.seconds

    short, long = 0, 1
    while long < LONGEST and not hides(long):
        short, long = long, 2 * long
    if not hides(long):
        return replace(cost, period=each * long)
    while long - short > 1:
        middle = (short + long) // 2
        short, long = (short, middle) if hides(middle) else (middle, long)
    return replace(cost, period=each * long)
