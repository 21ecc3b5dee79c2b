"""What a method's step takes on a cluster, predicted from what its exchange costs; and where the answer flips.

Costs hold for any number of workers. Flips are the bandwidth below which a method is faster than a baseline, and the
step time below which compressing starts to pay.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from accordion_bench.advising.cluster import Cluster
from accordion_bench.advising.step_times import StepTimes
from accordion_bench.comm.clock import Stage
from accordion_bench.comm.samples import Series
from accordion_bench.network.collective_costs import PAIRS, wire_and_rounds
from accordion_bench.network.link_model import largest_of, step_ends

FP32, BF16 = ("compressor=none",), ("compressor=bf16",)  # overrides of the baselines, with which others are compared
GAIN = 0.02  # a smaller one counts as none
HIDDEN = 0.05  # of a step, below which what is exposed of a local method counts as little
LONGEST = 2**14  # steps of a period that is looked for
LOWEST, HIGHEST = 1e5, 1e13  # bit/s
RATES_PER_DECADE = 6
LEAST_GAIN = 1e-3  # of the baseline's step, below which nothing is gained
SHORTEST_PASS, LONGEST_PASS = 1e-5, 1e3  # seconds of a forward and backward pass that are looked at
PASSES_PER_DECADE = 5


class Messages(NamedTuple):
    """Messages of one kind of collective in the exchange of a bucket.

    A worker of A hands over `fixed + shared / A` bytes in all.

    fixed: bytes, whatever the number of workers.
    shared: bytes that the workers divide among them, such as the sections of a two-way method.
    times: collectives, one after another.
    """

    fixed: float
    shared: float
    times: float

    def payload(self, workers: int) -> float:
        """Bytes that one worker hands over."""
        return self.fixed + self.shared / workers


@dataclass(frozen=True)
class BucketCost:
    """One bucket of an exchange; seconds of one worker alone on its device, medians.

    Args:
        members: its tensors, by index.
        encode: seconds of work before the last collective has ended.
        decode: seconds after it, (fixed, for each worker of the run): A workers take `fixed + A per_worker`.
        messages: by kind of collective: `all_reduce`, `all_gather`, `all_to_all`, `send_receive`.
    """

    members: tuple[int, ...]
    encode: float
    decode: tuple[float, float]
    messages: Mapping[str, Messages]

    def stage(self, ready: float, workers: int) -> Stage:
        """The bucket as the modelled clock takes it, for so many workers."""
        kinds = {
            kind: wire_and_rounds(kind, sent.payload(workers), sent.times, workers)
            for kind, sent in self.messages.items()
        }
        wire, rounds = (sum(each[i] for each in kinds.values()) for i in (0, 1))
        return Stage(ready, self.encode, self.decode[0] + self.decode[1] * workers, wire, rounds, kinds)

    def scaled(self, factor: float) -> "BucketCost":
        """The same bucket with a codec that takes so many times as long."""
        return replace(self, encode=factor * self.encode, decode=(factor * self.decode[0], factor * self.decode[1]))


@dataclass(frozen=True)
class MethodCost:
    """One method, or one setting of it.

    Args:
        name: as reports spell it: `PowerSGD, rank 4`.
        overrides: what to type for it: `compressor=powersgd compressor.rank=4`.
        buckets: in the order in which they travel.
        state: bytes that the method keeps in each worker beside the model: residuals, momentum, warm starts.
        extra: seconds that each step takes longer because of the method, outside the exchange (a step of its own).
        overlaps: buckets leave while the backward pass goes on.
        local: workers take local steps, and exchange differences every `period` steps, after the step.
        period: of a local method, steps from one exchange to the next; 1 otherwise.
        parts: of a local method that exchanges some tensors at a time, the buckets of each exchange of a period, by
            index; () = all of them at once.
        delay: of a local method with `overlaps`, steps that an exchange travels beside; None = until the next one.
        every_local_step: of a local method that exchanges after every step, so that no period is looked for.
        waits: workers wait for each other; else each goes at its own pace, and what it sends to one other worker at a
            time travels beside its next step.
        quorum: of a local method whose exchanges can go on without late workers.
        repetitions: seconds of codec of each measured exchange in all, for intervals.
        crowded_from: workers from which on messages of all of them would be longer than an all-reduce, so that most of
            what they would decode travels by one instead; infinity = never.
        crowded: the buckets from there on.
    """

    name: str
    overrides: tuple[str, ...]
    buckets: tuple[BucketCost, ...]
    state: float = 0.0
    extra: float = 0.0
    overlaps: bool = True
    local: bool = False
    period: int = 1
    parts: tuple[tuple[int, ...], ...] = ()
    delay: int | None = None
    every_local_step: bool = False
    waits: bool = True
    quorum: bool = False
    repetitions: tuple[float, ...] = ()
    crowded_from: float = math.inf
    crowded: tuple[BucketCost, ...] = ()

    @property
    def baseline(self) -> bool:
        """Whether others are compared with it."""
        return self.overrides in (FP32, BF16)

    @property
    def in_pairs(self) -> bool:
        """Whether two workers wait for each other, and for no third."""
        return all(set(bucket.messages) == {PAIRS} for bucket in self.buckets)

    def together(self, workers: int) -> int:
        """How many workers begin an exchange when the last of them is ready."""
        return (min(workers, 2) if self.in_pairs else workers) if self.waits else 1

    def among(self, workers: int) -> tuple[BucketCost, ...]:
        """The buckets of a run of so many workers."""
        return self.buckets if workers < self.crowded_from else self.crowded

    def stages(self, ready: Sequence[float], workers: int) -> list[Stage]:
        """All buckets, each ready with its last tensor.

        Args:
            ready: of each tensor.
            workers: A.
        """
        return [
            bucket.stage(max((ready[i] for i in bucket.members), default=0.0), workers)
            for bucket in self.among(workers)
        ]

    def exchanges(self, stages: Sequence[Stage]) -> list[list[Stage]]:
        """All buckets, by the exchange of a period in which they travel."""
        return [[stages[i] for i in part] for part in self.parts] or [list(stages)]

    @property
    def between(self) -> float:
        """Steps from one exchange of a period to the next one."""
        return self.period / max(1, len(self.parts))

    @property
    def beside(self) -> float:
        """Steps that an exchange of a local method travels beside."""
        return (self.between if self.delay is None else self.delay) if self.overlaps else 0.0

    def scaled(self, factor: float) -> "MethodCost":
        """The same method with codecs that take so many times as long."""
        buckets, crowded = (tuple(one.scaled(factor) for one in few) for few in (self.buckets, self.crowded))
        return replace(self, buckets=buckets, crowded=crowded, extra=factor * self.extra)

    def payload(self, workers: int) -> float:
        """Bytes that one worker hands over in an exchange."""
        return sum(sent.payload(workers) for bucket in self.among(workers) for sent in bucket.messages.values())

    def wire(self, workers: int) -> float:
        """Bytes that one worker's link sends in an exchange."""
        return sum(bucket.stage(0.0, workers).wire for bucket in self.among(workers))


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
    exchanges, of some tensors each, they are added, and H is the steps from one to the next. Of workers that meet in
    pairs, the later one of two counts; one that waits for no other exchanges beside each of its steps. A burst comes
    back only while the link is idle, so that no step is shorter than what the link alone takes for its bytes without
    one.

    Args:
        times: of one worker alone.
        cost: of the method.
        cluster: where it runs.
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


def break_even(times: StepTimes, cost: MethodCost, baseline: MethodCost, cluster: Cluster) -> float:
    """The bandwidth between machines below which a method is faster than the baseline; all else stays as it is.

    Args:
        times: of a step.
        cost: of the method.
        baseline: of the other one.
        cluster: with workers and latencies.

    Returns:
        bit/s; 0 = it is faster at none, infinity = at all, NaN = only at some that are fast: on slow links, where bytes
        decide, it is slower.
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
    low, high = grid[first - 1], grid[first]
    while high / low > 1.001:
        middle = math.sqrt(high * low)
        low, high = (middle, high) if gains(middle) else (low, middle)
    return float(low)


def pays_below(times: StepTimes, costs: Sequence[MethodCost], cluster: Cluster) -> float:
    """Seconds of a forward and backward pass below which some method is faster than dense fp32 and bf16, by 2 %.

    Local methods are left out, because they change the algorithm. Optimizer, codecs and links stay as they are.

    Args:
        times: of a step; gradients are ready at the same shares of it.
        costs: of the methods.
        cluster: where they run.

    Returns:
        0 = none is, however short it is; infinity = one is, however long.
    """
    every_step = [cost for cost in costs if not cost.local]

    def pays(seconds: float) -> bool:
        shorter = lasting(times, seconds)
        dense, others = (
            min(
                (step(shorter, cost, cluster).seconds for cost in every_step if cost.baseline is wanted),
                default=math.inf,
            )
            for wanted in (True, False)
        )
        return dense > (1 + GAIN) * others

    places = round(PASSES_PER_DECADE * math.log10(LONGEST_PASS / SHORTEST_PASS)) + 1
    grid = np.geomspace(SHORTEST_PASS, LONGEST_PASS, places).tolist()
    last = next((i for i in reversed(range(places)) if pays(grid[i])), None)
    if last is None:
        return 0.0
    if last == places - 1:
        return math.inf
    low, high = grid[last], grid[last + 1]
    while high / low > 1.005:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return float(low)


def lasting(times: StepTimes, seconds: float) -> StepTimes:
    """The same step with a forward and backward pass of so many seconds."""
    factor = seconds / times.backward_end
    return replace(times.scaled(factor), update=times.update, steps=tuple(factor * taken for taken in times.steps))
