"""Advice: which methods save time on a cluster, as a table that is predicted from times of a step and of codecs."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from accordion_bench.advising.predict import (
    BF16,
    FP32,
    Cluster,
    MethodCost,
    Step,
    break_even,
    pays_below,
    shortest_period,
    step,
)
from accordion_bench.advising.step_times import StepTimes
from accordion_bench.options.checks import ConfigError
from accordion_bench.tensors import keyed_rng

if TYPE_CHECKING:
    import pandas as pd


class Interval(NamedTuple):
    """A number and the 95 % interval about it, from what was measured again and again."""

    value: float
    low: float
    high: float


class Pays(NamedTuple):
    """Where compressing starts to pay.

    below: seconds of a forward and backward pass; 0 = at no step time, infinity = at every one.
    on: the devices that this is said of; "" = those that the advice is for.
    """

    below: float
    on: str = ""


def limit_in_words(limit: float) -> str:
    """A limit that is not a number, as words; "" for a number."""
    if math.isnan(limit):
        return "only on fast links"
    return "always" if math.isinf(limit) else "" if limit else "never"


@dataclass(frozen=True)
class AdviceRow:
    """What one method would take on the cluster.

    Args:
        method: as reports spell it.
        overrides: what to type for it.
        step: seconds of a training step; of a local method, the mean over a period.
        over_fp32, over_bf16: how many times as fast as the dense baseline, overlapped; above 1 = faster.
        exposed: seconds of communication and codec that a step waits for.
        payload_bytes, wire_bytes: of one worker, per step.
        memory_bytes: that the method keeps in each worker.
        break_even_fp32, break_even_bf16: bit/s of the (outer) link below which it is faster than the baseline; 0 =
            never, infinity = at every bandwidth, NaN = only on fast links.
        period: steps between two exchanges.
        local: a local method: the shortest period with less than 5 % exposed, or the longest that was looked for.
        every_local_step: but for one that exchanges after every step.
        accuracy: what it has cost in runs at hand, in words; "" = not known.
        command: that would measure the accuracy.
    """

    method: str
    overrides: tuple[str, ...]
    step: Interval
    over_fp32: Interval
    over_bf16: Interval
    exposed: Interval
    payload_bytes: float
    wire_bytes: float
    memory_bytes: float
    break_even_fp32: float
    break_even_bf16: float
    period: int = 1
    local: bool = False
    every_local_step: bool = False
    accuracy: str = ""
    command: str = ""

    def flat(self) -> dict[str, Any]:
        """The row as columns: intervals as `step`, `step_low`, `step_high`; break-evens without a number as words."""
        found: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, Interval):
                found |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
            elif name == "overrides":
                found[name] = " ".join(value)
            elif name.startswith("break_even"):
                found[name] = limit_in_words(value) or value
            else:
                found[name] = value
        return found


@dataclass(frozen=True)
class Regions:
    """Step time of every method over bandwidth, or over workers: what the figures draw.

    Args:
        axis: `bandwidth` (bit/s of the outer link) or `workers`.
        at: where on the axis.
        here: the reader's own.
        steps: seconds of a step by method, one for each of `at`.
    """

    axis: str
    at: tuple[float, ...]
    here: float
    steps: dict[str, tuple[float, ...]]

    def fastest(self) -> list[str]:
        """The fastest method at each place of the axis."""
        return [min(self.steps, key=lambda name: self.steps[name][i]) for i in range(len(self.at))]


@dataclass(frozen=True)
class Advice:
    """The whole advice for one model on one cluster.

    Args:
        model, device: what was timed, and where.
        machines, workers_per_machine: of the cluster.
        network: the link's options, as `network=custom` takes them.
        compute: seconds of a step without communication.
        verdict: sentences, the answer first.
        doubts: why it may be wrong, a sentence each.
        rows: sorted by step time.
        by_bandwidth, by_workers: for the figures.
        left_out: methods that could not be timed, and why.
        on: the device that it is computed for, as one says it: `THIS CPU`, `an NVIDIA H100 (estimated)`.
        pays: the step time at which the answer flips; None = not looked for.
    """

    model: str
    device: str
    machines: int
    workers_per_machine: int
    network: dict[str, object]
    compute: Interval
    verdict: tuple[str, ...]
    doubts: tuple[str, ...]
    rows: tuple[AdviceRow, ...]
    by_bandwidth: Regions
    by_workers: Regions
    left_out: dict[str, str]
    on: str = ""
    pays: Pays | None = None

    @property
    def workers(self) -> int:
        """Workers of all machines."""
        return self.machines * self.workers_per_machine

    def table(self) -> "pd.DataFrame":
        """A data frame with one row for each method, as in the CSV."""
        import pandas as pd  # half a second that others need not wait

        return pd.DataFrame([row.flat() for row in self.rows])

    def row(self, method: str) -> AdviceRow:
        """The row of one method."""
        return next(row for row in self.rows if row.method == method)


def by_step(rows: Sequence[AdviceRow]) -> list[AdviceRow]:
    """Rows sorted by step time, the fastest first."""
    return sorted(rows, key=lambda row: row.step.value)


DRAWS = 100
SLOWEST, FASTEST = 1e7, 4e11  # bit/s that figures show
PLACES = 41
MOST_WORKERS = 4096


def factors(name: str, measured: Sequence[float]) -> list[float]:
    """Medians of resampled measurements over their median: the bootstrap (Efron 1979), `DRAWS` times.

    Args:
        name: of what was measured, which keys the draws.
        measured: seconds; of fewer than two, nothing is known of their spread, and all factors are 1.
    """
    if len(measured) < 2 or not statistics.median(measured):
        return [1.0] * DRAWS
    draw = np.random.default_rng(keyed_rng.key(name))
    values = np.asarray(measured)
    again = np.median(values[draw.integers(len(values), size=(DRAWS, len(values)))], axis=1)
    return (again / np.median(values)).tolist()


def link_factors(error: float) -> list[float]:
    """Log-normal factors of a link's bandwidth, whose fit has this relative error."""
    return np.exp(error * np.random.default_rng(keyed_rng.key("link")).standard_normal(DRAWS)).tolist()


def interval(value: float, drawn: Sequence[float]) -> Interval:
    """A number, with the middle 95 % of the drawn values as its interval."""
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Interval(value, min(value, float(low)), max(value, float(high)))


def advise(
    times: StepTimes,
    costs: Sequence[MethodCost],
    cluster: Cluster,
    link_error: float = 0.0,
    pays: Pays | None = None,
) -> Advice:
    """What each method would do on a cluster; nothing is trained, and nothing is timed here.

    The record of the link's options and of methods that were left out is the caller's to add.

    Args:
        times: of a step of one worker alone.
        costs: of the methods, with dense fp32 and bf16 among them.
        cluster: links, workers, cores.
        link_error: relative error of the fitted link; 0 = taken as exact.
        pays: where compressing starts to pay, if that is said of other devices; None = found for these.

    Raises:
        ConfigError: dense fp32 or bf16 is missing, with which all others are compared.
    """
    fp32, bf16 = (reference(costs, overrides) for overrides in (FP32, BF16))
    settled = [
        shortest_period(times, cost, cluster) if cost.local and not cost.every_local_step else cost for cost in costs
    ]
    drawn = DrawnMeasurements(times, cluster, link_error)
    baselines = [drawn.steps(cost) for cost in (fp32, bf16)]
    rows = [row(times, cost, cluster, drawn, (fp32, bf16), baselines) for cost in settled]
    compute = cluster.slowdown * times.compute
    computes = [compute * factor for factor in drawn.computing]
    return Advice(
        model=times.model,
        device=times.device,
        machines=math.ceil(cluster.workers / cluster.network.workers_per_machine),
        workers_per_machine=min(cluster.workers, cluster.network.workers_per_machine),
        network={},
        compute=interval(compute, computes),
        verdict=(),
        doubts=tuple(times.doubts()),
        rows=tuple(by_step(rows)),
        by_bandwidth=over_bandwidth(times, settled, cluster),
        by_workers=over_workers(times, settled, cluster),
        left_out={},
        on=times.place,
        pays=pays or Pays(pays_below(times, costs, cluster)),
    )


def reference(costs: Sequence[MethodCost], overrides: tuple[str, ...]) -> MethodCost:
    """The baseline of these overrides."""
    found = next((cost for cost in costs if cost.overrides == overrides), None)
    if found is None:
        typed = " ".join(overrides)
        raise ConfigError(f"methods must hold {typed}, with which others are compared, got none; add {typed}")
    return found


class DrawnMeasurements:
    """The same step under resampled measurements.

    Args:
        times: of a step.
        cluster: links, workers, cores.
        link_error: relative error of the fitted link.
    """

    def __init__(self, times: StepTimes, cluster: Cluster, link_error: float) -> None:
        self.computing = factors("step", times.steps)
        self.times = [times.scaled(factor) for factor in self.computing]
        bandwidths = [cluster.network.bandwidth * factor for factor in link_factors(link_error)]
        self.clusters = [cluster.at(bandwidth) if link_error else cluster for bandwidth in bandwidths]

    def steps(self, cost: MethodCost) -> list[Step]:
        """The step under each draw; draws are the same for all methods."""
        codecs = factors(cost.name, cost.repetitions)
        return [
            step(self.times[i], cost.scaled(codecs[i]) if codecs[i] != 1 else cost, self.clusters[i])
            for i in range(DRAWS)
        ]


def row(
    times: StepTimes,
    cost: MethodCost,
    cluster: Cluster,
    drawn: DrawnMeasurements,
    baselines: tuple[MethodCost, MethodCost],
    steps_of_baselines: Sequence[Sequence[Step]],
) -> AdviceRow:
    """The row of one method.

    Args:
        times: of a step.
        cost: of the method, of a local one with its period.
        cluster: links, workers, cores.
        drawn: measurements that might have been made.
        baselines: dense fp32 and bf16.
        steps_of_baselines: under the same draws.
    """
    taken, again = step(times, cost, cluster), drawn.steps(cost)

    def faster(baseline: MethodCost, others: Sequence[Step]) -> Interval:
        ratios = [other.seconds / own.seconds for own, other in zip(again, others, strict=True)]
        return interval(step(times, baseline, cluster).seconds / taken.seconds, ratios)

    over_fp32, over_bf16 = map(faster, baselines, steps_of_baselines)
    break_evens = [0.0 if cost is baseline else break_even(times, cost, baseline, cluster) for baseline in baselines]
    return AdviceRow(
        method=cost.name,
        overrides=cost.overrides,
        step=interval(taken.seconds, [one.seconds for one in again]),
        over_fp32=over_fp32,
        over_bf16=over_bf16,
        exposed=interval(taken.exposed, [one.exposed for one in again]),
        payload_bytes=cost.payload(cluster.workers) / cost.period,
        wire_bytes=cost.wire(cluster.workers) / cost.period,
        memory_bytes=cost.state,
        break_even_fp32=break_evens[0],
        break_even_bf16=break_evens[1],
        period=cost.period,
        local=cost.local,
        every_local_step=cost.every_local_step,
    )


def over_bandwidth(times: StepTimes, costs: Sequence[MethodCost], cluster: Cluster) -> Regions:
    """Step time of each method over the bandwidth between machines, which includes the cluster's own."""
    own = cluster.network.bandwidth
    places = sorted({*np.geomspace(SLOWEST, FASTEST, PLACES).tolist(), own})
    there = [cluster.at(bandwidth) for bandwidth in places]
    steps = {cost.name: tuple(step(times, cost, where).seconds for where in there) for cost in costs}
    return Regions("bandwidth", tuple(places), own, steps)


def over_workers(times: StepTimes, costs: Sequence[MethodCost], cluster: Cluster) -> Regions:
    """Step time of each method over the number of workers; each worker keeps its batch size."""
    doubled = [2**power for power in range(1, 1 + round(math.log2(MOST_WORKERS)))]
    places = sorted({*doubled, cluster.workers})
    most = cluster.network.workers_per_machine

    def cores(workers: int) -> float:  # which fewer workers of a machine share; a GPU is not shared
        fewer = min(most, cluster.workers) / min(most, workers) if times.device == "cpu" else 1.0
        return cluster.cores * fewer

    there = [Cluster(cluster.network, workers, cores(workers)) for workers in places]
    steps = {cost.name: tuple(step(times, cost, where).seconds for where in there) for cost in costs}
    return Regions("workers", tuple(map(float, places)), float(cluster.workers), steps)
