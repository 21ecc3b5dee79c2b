"""Predict the step time of a method on a cluster from the costs of its exchange, and compute break-even points.

Costs are valid for any number of workers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from accordion_bench.advising.cluster import Cluster
from accordion_bench.advising.step_times import StepTimes
from accordion_bench.comm.samples import Series
from accordion_bench.comm.stages import Stage
from accordion_bench.network.collective_costs import PAIRS, wire_and_rounds
from accordion_bench.network.link_model import largest_of, step_ends

FP32, BF16 = ("compressor=none",), ("compressor=bf16",)  # overrides of the baselines
GAIN = 0.02  # a smaller relative gain is treated as none
HIDDEN = 0.05  # upper bound of the exposed share of a step in the search for a local method's period
LONGEST = 2**14  # upper bound of the searched number of steps between exchanges
LOWEST, HIGHEST = 1e5, 1e13  # searched bandwidths, bit/s
RATES_PER_DECADE = 6
LEAST_GAIN = 1e-3  # a smaller gain, relative to the baseline's step, is ignored by `break_even`
SHORTEST_PASS, LONGEST_PASS = 1e-5, 1e3  # searched durations of a forward and backward pass, seconds
PASSES_PER_DECADE = 5


class Messages(NamedTuple):
    """Messages of one kind of collective in the exchange of a bucket.

    The payload of each of A workers is `fixed + shared / A` bytes in total.
    """

    fixed: float  # bytes independent of the number of workers
    shared: float  # bytes divided among the workers, such as the sections of a two-way method
    times: float  # number of successive collectives

    def payload(self, workers: int) -> float:
        """Return the payload of one worker in bytes."""
        return self.fixed + self.shared / workers


@dataclass(frozen=True)
class BucketCost:
    """Costs of one bucket of an exchange: median seconds of one worker alone on its device, and messages."""

    members: tuple[int, ...]  # indices of the bucket's tensors
    encode: float  # seconds of work before the end of the last collective
    # seconds after it as (fixed, per worker of the run): with A workers, `fixed + A per_worker`
    decode: tuple[float, float]
    # messages by kind of collective: `all_reduce`, `all_gather`, `all_to_all`, `send_receive`
    messages: Mapping[str, Messages]

    def stage(self, ready: float, workers: int) -> Stage:
        """Return the bucket, ready after `ready` seconds, as input of the modelled clock for A = `workers`."""
        kinds = {
            kind: wire_and_rounds(kind, sent.payload(workers), sent.times, workers)
            for kind, sent in self.messages.items()
        }
        wire, rounds = (sum(each[i] for each in kinds.values()) for i in (0, 1))
        return Stage(ready, self.encode, self.decode[0] + self.decode[1] * workers, wire, rounds, kinds)

    def scaled(self, factor: float) -> "BucketCost":
        """Return the same bucket with codec times multiplied by a factor."""
        return replace(self, encode=factor * self.encode, decode=(factor * self.decode[0], factor * self.decode[1]))


@dataclass(frozen=True)
class MethodCost:
    """Costs of one method at one setting."""

    name: str  # label, as in reports: `PowerSGD, rank 4`
    overrides: tuple[str, ...]  # command-line overrides that select it: `compressor=powersgd compressor.rank=4`
    buckets: tuple[BucketCost, ...]  # buckets in the order of their exchange
    # bytes of the method's state in each worker, without the model: residuals, momentum, warm starts
    state: float = 0.0
    extra: float = 0.0  # additional seconds per step outside the exchange, such as those of the method's own update
    # whether buckets are sent during the backward pass; for a local method, during the next local steps
    overlaps: bool = True
    local: bool = False  # whether workers take local steps and exchange differences after every `period` steps
    period: int = 1  # steps between two rounds of exchanges of a local method; 1 otherwise
    # for a local method that exchanges some tensors at a time, the indices of the buckets of each exchange of a period;
    # () = all buckets in one exchange
    parts: tuple[tuple[int, ...], ...] = ()
    # for a local method with `overlaps`, number of steps during which an exchange runs; None = until the next exchange
    delay: int | None = None
    every_local_step: bool = False  # whether a local method exchanges after every step; no period is then searched
    # whether workers wait for each other. Otherwise each proceeds at its own pace, and its messages to one other worker
    # at a time are sent during its next step.
    waits: bool = True
    quorum: bool = False  # whether the exchanges of a local method can proceed without late workers
    repetitions: tuple[float, ...] = ()  # total codec seconds of each measured exchange, for confidence intervals
    # number of workers from which messages of all workers would be longer than an all-reduce, which is then used for
    # most tensors; infinity = never
    crowded_from: float = math.inf
    crowded: tuple[BucketCost, ...] = ()  # buckets for `crowded_from` or more workers

    @property
    def baseline(self) -> bool:
        """Whether this is dense fp32 or bf16, with which other methods are compared."""
        return self.overrides in (FP32, BF16)

    @property
    def in_pairs(self) -> bool:
        """Whether workers exchange in pairs, so that each waits for one other worker only."""
        return all(set(bucket.messages) == {PAIRS} for bucket in self.buckets)

    def together(self, workers: int) -> int:
        """Return how many workers wait for the last of them before an exchange starts."""
        return (min(workers, 2) if self.in_pairs else workers) if self.waits else 1

    def among(self, workers: int) -> tuple[BucketCost, ...]:
        """Return the buckets of a run of this many workers."""
        return self.buckets if workers < self.crowded_from else self.crowded

    def stages(self, ready: Sequence[float], workers: int) -> list[Stage]:
        """Return all buckets as input of the modelled clock, given the seconds until each tensor is ready."""
        buckets = self.among(workers)
        return [bucket.stage(max((ready[i] for i in bucket.members), default=0.0), workers) for bucket in buckets]

    def exchanges(self, stages: Sequence[Stage]) -> list[list[Stage]]:
        """Group all buckets by the exchange of a period that sends them."""
        return [[stages[i] for i in part] for part in self.parts] or [list(stages)]

    @property
    def between(self) -> float:
        """Number of steps between two successive exchanges of a period."""
        return self.period / max(1, len(self.parts))

    @property
    def beside(self) -> float:
        """Number of local steps during which an exchange of a local method runs."""
        return (self.between if self.delay is None else self.delay) if self.overlaps else 0.0

    def scaled(self, factor: float) -> "MethodCost":
        """Return the same method with codec times and `extra` multiplied by a factor."""
        buckets, crowded = (tuple(one.scaled(factor) for one in few) for few in (self.buckets, self.crowded))
        return replace(self, buckets=buckets, crowded=crowded, extra=factor * self.extra)

    def payload(self, workers: int) -> float:
        """Return the payload of one worker in bytes, over all exchanges of a period."""
        return sum(sent.payload(workers) for bucket in self.among(workers) for sent in bucket.messages.values())

    def wire(self, workers: int) -> float:
        """Return the bytes sent over one worker's link, over all exchanges of a period."""
        return sum(bucket.stage(0.0, workers).wire for bucket in self.among(workers))


class Step(NamedTuple):
    """Seconds per step; for a local method, means over a period."""

    seconds: float  # total duration
    exposed: float  # time added by communication and codec to computation, the latter with the slowdown of shared cores


def step(times: StepTimes, cost: MethodCost, cluster: Cluster) -> Step:
    """Predict the duration of a step.

        exchange in every step     max(backward, end) + update + extra
        every H local steps        backward + update + extra + end / H
        overlapping the next H     max(H (backward + update + extra), end) / H
        the next tau < H           max(tau (backward + update + extra), end) / H + the other steps

    `end` is the end of the last bucket (docs/network.md). A bucket starts when the last worker has it ready: e_A
    standard deviations of a step after the mean worker, or sqrt(H) times as late after H local steps. If a period has
    several exchanges, each of some tensors, their times are added, and H is the number of steps between two of them.
    Of workers that exchange in pairs, the later of two counts. A worker that does not wait exchanges during each step.
    The burst of a link refills only while the link is idle. A step therefore takes at least as long as the link needs
    for its bytes without a burst.

    `times` are those of one worker alone.
    """
    slowdown = cluster.slowdown
    late = Series(times.steps).deviation() * largest_of(cost.together(cluster.workers))
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
    """Return the seconds that the link needs for the buckets once its burst is spent; 0 for links without a burst."""
    if not cluster.network.burst:
        return 0.0
    return math.fsum(cluster.network.of_bucket(bucket, cluster.workers) for bucket in buckets)


def shortest_period(times: StepTimes, cost: MethodCost, cluster: Cluster) -> MethodCost:
    """Return the local method with the shortest period that exposes less than 5 % of a step, or the longest period."""
    each = max(1, len(cost.parts))  # all exchanges of a period have the same number of steps between them

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


def break_even(times: StepTimes, cost: MethodCost, baseline: MethodCost, cluster: Cluster) -> float:
    """Return the bandwidth in bit/s between machines below which a method is faster than the baseline.

    All else is equal. 0 = the method is faster at no bandwidth, infinity = at all, NaN = only at some high bandwidths;
    on slow links, where bytes decide, it is slower.
    """

    def gains(bandwidth: float) -> bool:
        there = cluster.at(bandwidth)
        own, other = (step(times, one, there).seconds for one in (cost, baseline))
        return own < (1 - LEAST_GAIN) * other

    decades = math.log10(HIGHEST / LOWEST)
    grid = np.geomspace(LOWEST, HIGHEST, round(RATES_PER_DECADE * decades) + 1).tolist()
    faster = [gains(bandwidth) for bandwidth in grid]
    if all(faster):
        return math.inf
    if not faster[0]:
        return math.nan if any(faster) else 0.0
    first = faster.index(False)
    return _last(gains, grid[first - 1], grid[first], 1.001)


def pays_below(times: StepTimes, costs: Sequence[MethodCost], cluster: Cluster) -> float:
    """Return the seconds of the passes below which some method is faster than dense fp32 and bf16 by over 2 %.

    0 = no method is faster at any duration, infinity = some method is at every duration. Local methods are excluded,
    because they change the algorithm. Optimizer, codecs and links do not change, and gradients are ready at the same
    fractions of the passes.
    """
    every_step = [cost for cost in costs if not cost.local]

    def pays(seconds: float) -> bool:
        shorter = lasting(times, seconds)
        fastest = {True: math.inf, False: math.inf}  # of the baselines, of the others
        for cost in every_step:
            fastest[cost.baseline] = min(fastest[cost.baseline], step(shorter, cost, cluster).seconds)
        return fastest[True] > (1 + GAIN) * fastest[False]

    places = round(PASSES_PER_DECADE * math.log10(LONGEST_PASS / SHORTEST_PASS)) + 1
    grid = np.geomspace(SHORTEST_PASS, LONGEST_PASS, places).tolist()
    last = next((i for i in reversed(range(places)) if pays(grid[i])), None)
    if last is None:
        return 0.0
    if last == places - 1:
        return math.inf
    return _last(pays, grid[last], grid[last + 1], 1.005)


def _last(holds: Callable[[float], bool], low: float, high: float, ratio: float) -> float:
    """Return, up to this ratio, the largest number at which a condition holds that holds at `low` and not at `high`."""
    while high / low > ratio:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return float(low)


def lasting(times: StepTimes, seconds: float) -> StepTimes:
    """Return the same step with a forward and backward pass of this many seconds."""
    factor = seconds / times.backward_end
    return replace(times.scaled(factor), update=times.update, steps=tuple(factor * taken for taken in times.steps))
