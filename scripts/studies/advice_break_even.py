"""Link rate at which an arm and dense take the same time, by bisection: behind links, and of the model."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.studies import advice_cells as cells
from scripts.studies.advice_cells import Cell

SLOWEST, FASTEST = 1e7, 1e10  # bit/s between which it is looked for
NEAR = 0.2  # relative error that is aimed at
HALVINGS = 30  # of the model, which costs nothing


@dataclass(frozen=True)
class Crossing:
    """Rate at which a ratio of step times passes 1.

    Args:
        rate: bit/s; 0 = the ratio is above 1 on every link that was tried, infinity = below.
        low, high: rates of the closest links on either side, in bit/s.
    """

    rate: float
    low: float
    high: float


def crossing(
    ratio: Callable[[float], float], halvings: int, slowest: float = SLOWEST, fastest: float = FASTEST
) -> Crossing:
    """Bisect the interval of rates on a logarithmic scale; interpolate the ratio linearly between the last two links.

    Args:
        ratio: ratio of an arm's step time to the baseline's on links of a rate in bit/s; below 1 on slow ones.
        halvings: number of links that are tried.
        slowest, fastest: ends of the interval in bit/s.
    """
    low, high = slowest, fastest
    tried: dict[float, float] = {}
    for _ in range(halvings):
        rate = float(f"{math.sqrt(low * high):.4g}")
        tried[rate] = ratio(rate)
        low, high = (rate, high) if tried[rate] < 1 else (low, rate)
    if low not in tried or high not in tried:
        return Crossing(math.inf if low in tried else 0.0, low, high)
    below, above = math.log(tried[low]), math.log(tried[high])
    return Crossing(low * (high / low) ** (-below / (above - below)), low, high)


def measured_crossing(path: Path, key: Cell, launches: int, launch: Callable[[float], Cell]) -> Crossing:
    """Measure a crossing behind links; each launch is written as soon as it has finished, and not repeated.

    Args:
        path: path of the file.
        key: arm, model and hosts.
        launches: number of launches.
        launch: function that measures both arms behind links of a rate in bit/s and returns the seconds of each round,
            by arm.
    """
    row = cells.find(cells.read(path), **key) or {**key, "launches": []}

    def ratio(rate: float) -> float:
        known = cells.find(row["launches"], rate=rate)
        if known is None:
            known = {"rate": rate, **launch(rate)}
            row["launches"].append(known)
            cells.keep(path, row, tuple(key))
        return ratio_of(known, key["arm"])

    return crossing(ratio, launches)


def ratio_of(launch: Cell, arm: str) -> float:
    """Return the ratio of an arm to dense, median over the rounds that both have."""
    pairs = zip(launch["seconds"][arm], launch["seconds"]["dense"], strict=False)
    return statistics.median(own / dense for own, dense in pairs)


def predicted_crossing(trial: Cell, out: Path, arm: str, hosts: int) -> Crossing:
    """Return the crossing that the model predicts.

    Args:
        trial: trial of the model.
        out: folder with the probes.
        arm: one of `ARMS`.
        hosts: number of hosts.
    """
    from accordion_bench.advising.predict import step
    from scripts.studies.advice_predict import cluster_of, costs_of, link_at, links
    from scripts.studies.advice_trial import times_from

    probed, times, costs = links(out, hosts), times_from(trial["step"]), costs_of(trial)

    def ratio(rate: float) -> float:
        cluster = cluster_of(link_at(rate, probed), hosts)
        own, dense = (step(times, costs[name], cluster).seconds for name in (arm, "dense"))
        return own / dense

    return crossing(ratio, HALVINGS)


def mbit(rate: float | None) -> str:
    """Convert bit/s to Mbit/s; None in a file means that the arm was faster behind every link."""
    if rate is None or math.isinf(rate):
        return "above all"
    return f"{rate / 1e6:.0f}" if rate else "below all"


def table(rows: Sequence[Cell]) -> list[str]:
    """Markdown."""
    lines = [
        "| arm | model | hosts | measured, Mbit/s (between) | predicted, Mbit/s | error | aimed at |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if "predicted" in row:
            measured, predicted = row["measured"], row["predicted"]
            error = predicted / measured - 1 if measured and predicted else None
            words = "-" if error is None else f"{100 * error:+.0f} % {'' if abs(error) <= NEAR else 'MISSED'}"
            where = f"{mbit(measured)} ({mbit(row['low'])} to {mbit(row['high'])})"
            name = f"| {row['arm']} | {row['model']} | {row['hosts']}"
            lines.append(f"{name} | {where} | {mbit(predicted)} | {words} | {NEAR:.0%} |")
    return lines
