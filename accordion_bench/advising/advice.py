"""Advice: predicted step times of all methods on a cluster, with confidence intervals and break-even bandwidths."""

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
    """Estimate and its 95 % confidence interval, from repeated measurements."""

    value: float
    low: float
    high: float


class Pays(NamedTuple):
    """Step time below which compression saves time."""

    below: float  # seconds of the forward and backward pass; 0 = at no step time, infinity = at every step time
    on: str = ""  # devices for which the limit holds; "" = those that the advice is for


def limit_in_words(limit: float) -> str:
    """Return the words for a limit of 0, infinity or NaN; "" for any other number."""
    if math.isnan(limit):
        return "only on fast links"
    return "always" if math.isinf(limit) else "" if limit else "never"


@dataclass(frozen=True)
class AdviceRow:
    """Predicted costs of one method on the cluster.

    Args:
        method: label, as in reports.
        overrides: command-line overrides that select the method.
        step: seconds per training step; for a local method, the mean over a period.
        over_fp32, over_bf16: speed-up over the overlapped dense baseline; above 1 = faster.
        exposed: seconds per step of communication and codec that computation does not hide.
        payload_bytes, wire_bytes: bytes per worker and step.
        memory_bytes: bytes of the method's state in each worker.
        break_even_fp32, break_even_bf16: bandwidth of the (outer) link in bit/s below which the method is faster than
            the baseline; 0 = never, infinity = at every bandwidth, NaN = only on fast links.
        period: steps between two exchanges. For a local method, the shortest period with less than 5 % exposed, or the
            longest period searched.
        local: whether the method takes local steps.
        every_local_step: whether a local method exchanges after every step; its period is then not searched.
        accuracy: accuracy against dense in the given runs, in words; "" = unknown.
        command: command that measures the accuracy.
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
        """Return the row as columns: intervals as `step`, `step_low`, `step_high`; infinite or NaN limits as words."""
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
    """Step time of every method as a function of bandwidth or of the number of workers, for the figures."""

    axis: str  # `bandwidth` (bit/s of the outer link) or `workers`
    at: tuple[float, ...]  # values on the axis
    here: float  # value of the given cluster
    steps: dict[str, tuple[float, ...]]  # seconds per step by method, one for each value in `at`

    def fastest(self) -> list[str]:
        """Return the fastest method at each value of the axis."""
        return [min(self.steps, key=lambda name: self.steps[name][i]) for i in range(len(self.at))]


@dataclass(frozen=True)
class Advice:
    """Advice for one model on one cluster.

    Args:
        model, device: name of the timed model, and type of the device.
        machines, workers_per_machine: size of the cluster.
        network: options of the link, as `network=custom` takes them.
        compute: seconds per step without communication.
        verdict: sentences, the answer first.
        doubts: reasons why the prediction may be wrong, one clause each.
        rows: one per method, sorted by step time.
        by_bandwidth, by_workers: data of the figures.
        left_out: reason by method for the methods that could not be timed.
        on: name of the device that the advice is for: `THIS CPU`, `an NVIDIA H100 (estimated)`.
        pays: step time below which compression saves time; None = not computed.
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
        """Number of workers of all machines."""
        return self.machines * self.workers_per_machine

    def table(self) -> "pd.DataFrame":
        """Return a data frame with one row per method, as in the CSV."""
        import pandas as pd  # imported late: the import takes half a second

        return pd.DataFrame([row.flat() for row in self.rows])

    def row(self, method: str) -> AdviceRow:
        """Return the row of one method."""
        return next(row for row in self.rows if row.method == method)


def by_step(rows: Sequence[AdviceRow]) -> list[AdviceRow]:
    """Return the rows sorted by step time, the fastest first."""
    return sorted(rows, key=lambda row: row.step.value)


DRAWS = 100
SLOWEST, FASTEST = 1e7, 4e11  # range of the figures, bit/s
PLACES = 41
MOST_WORKERS = 4096


def factors(name: str, measured: Sequence[float]) -> list[float]:
    """Return `DRAWS` bootstrap medians of the measurements, relative to their median (Efron 1979).

    The draws are keyed by `name`. With fewer than two measurements the spread is unknown, and all factors are 1.
    """
    if len(measured) < 2 or not statistics.median(measured):
        return [1.0] * DRAWS
    draw = np.random.default_rng(keyed_rng.key(name))
    values = np.asarray(measured)
    again = np.median(values[draw.integers(len(values), size=(DRAWS, len(values)))], axis=1)
    return (again / np.median(values)).tolist()


def link_factors(error: float) -> list[float]:
    """Return `DRAWS` log-normal factors of a link's bandwidth for this relative error of its fit."""
    return np.exp(error * np.random.default_rng(keyed_rng.key("link")).standard_normal(DRAWS)).tolist()


def interval(value: float, drawn: Sequence[float]) -> Interval:
    """Return a number with the middle 95 % of the drawn values as its interval."""
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Interval(value, min(value, float(low)), max(value, float(high)))


def advise(
    times: StepTimes,
    costs: Sequence[MethodCost],
    cluster: Cluster,
    link_error: float = 0.0,
    pays: Pays | None = None,
) -> Advice:
    """Predict the step time of each method on a cluster. The function neither trains nor times anything.

    The caller adds the verdict, the link's options and the methods that were left out.

    Args:
        link_error: relative error of the fitted link; 0 = exact.
        pays: limit for other devices; None = compute it for these.

    Raises:
        ConfigError: a baseline, dense fp32 or bf16, is missing.
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
    """Return the baseline with these overrides."""
    found = next((cost for cost in costs if cost.overrides == overrides), None)
    if found is None:
        typed = " ".join(overrides)
        raise ConfigError(f"methods must hold {typed}, with which others are compared, got none; add {typed}")
    return found


class DrawnMeasurements:
    """`DRAWS` bootstrap resamples of step times, codec times and bandwidth, for confidence intervals."""

    def __init__(self, times: StepTimes, cluster: Cluster, link_error: float) -> None:
        self.computing = factors("step", times.steps)
        self.times = [times.scaled(factor) for factor in self.computing]
        bandwidths = [cluster.network.bandwidth * factor for factor in link_factors(link_error)]
        self.clusters = [cluster.at(bandwidth) if link_error else cluster for bandwidth in bandwidths]

    def steps(self, cost: MethodCost) -> list[Step]:
        """Return the predicted step for each draw. Draws of step times and bandwidth are the same for all methods."""
        codecs = factors(cost.name, cost.repetitions)
        costs = [cost.scaled(codec) if codec != 1 else cost for codec in codecs]
        return list(map(step, self.times, costs, self.clusters))


def row(
    times: StepTimes,
    cost: MethodCost,
    cluster: Cluster,
    drawn: DrawnMeasurements,
    baselines: tuple[MethodCost, MethodCost],
    steps_of_baselines: Sequence[Sequence[Step]],
) -> AdviceRow:
    """Return the row of one method, with its period if it is local.

    The baselines are dense fp32 and bf16; their steps are those predicted for the same draws.
    """
    taken, again = step(times, cost, cluster), drawn.steps(cost)

    def faster(baseline: MethodCost, others: Sequence[Step]) -> Interval:
        ratios = [other.seconds / own.seconds for own, other in zip(again, others, strict=True)]
        return interval(step(times, baseline, cluster).seconds / taken.seconds, ratios)

    over_fp32, over_bf16 = map(faster, baselines, steps_of_baselines)
    below_fp32, below_bf16 = (
        0.0 if cost is baseline else break_even(times, cost, baseline, cluster) for baseline in baselines
    )
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
        break_even_fp32=below_fp32,
        break_even_bf16=below_bf16,
        period=cost.period,
        local=cost.local,
        every_local_step=cost.every_local_step,
    )


def over_bandwidth(times: StepTimes, costs: Sequence[MethodCost], cluster: Cluster) -> Regions:
    """Return step times over a grid of bandwidths between machines, including the cluster's own."""
    own = cluster.network.bandwidth
    places = sorted({*np.geomspace(SLOWEST, FASTEST, PLACES).tolist(), own})
    there = [cluster.at(bandwidth) for bandwidth in places]
    steps = {cost.name: tuple(step(times, cost, where).seconds for where in there) for cost in costs}
    return Regions("bandwidth", tuple(places), own, steps)


def over_workers(times: StepTimes, costs: Sequence[MethodCost], cluster: Cluster) -> Regions:
    """Return step times over a grid of numbers of workers; the batch size per worker is constant."""
    doubled = [2**power for power in range(1, 1 + round(math.log2(MOST_WORKERS)))]
    places = sorted({*doubled, cluster.workers})
    most = cluster.network.workers_per_machine

    def cores(workers: int) -> float:  # fewer workers of a machine have more cores each; a GPU is not shared
        fewer = min(most, cluster.workers) / min(most, workers) if times.device == "cpu" else 1.0
        return cluster.cores * fewer

    there = [Cluster(cluster.network, workers, cores(workers)) for workers in places]
    steps = {cost.name: tuple(step(times, cost, where).seconds for where in there) for cost in costs}
    return Regions("workers", tuple(map(float, places)), float(cluster.workers), steps)
