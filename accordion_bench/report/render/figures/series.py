"""The numbers behind the figures: columns of an arm's runs as arrays, and how far axes of the metric reach."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.intervals import half_width
from accordion_bench.runs.metrics import Metric, metric

Array = NDArray[np.float64]

WORST = 20  # points below the best arm: where worse ones are drawn, with their number
TIMES_WORST = 1.5  # the same for metrics without an upper end, as a factor


def column(arm: Arm, name: str) -> Array:
    """A column of metrics.jsonl [seeds, epochs], up to the shortest run's end; NaN where a row has none."""
    epochs = min(len(run.rows) for run in arm.runs)
    return np.array([[row.get(name) for row in run.rows[:epochs]] for run in arm.runs], dtype=np.float64)


def scores(arm: Arm) -> Array:
    """The metric [seeds, epochs] as it is written: shares in percent."""
    return metric_of([arm]).scaled(1.0) * column(arm, arm.metric)


def ends(arm: Arm) -> list[float]:
    """The metric of each seed after the last epoch, as it is written."""
    return [metric_of([arm]).scaled(run.rows[-1][arm.metric]) for run in arm.runs]


def metric_of(arms: Sequence[Arm]) -> Metric:
    """What the arms of one setting are judged by."""
    return metric(arms[0].metric)


def interval(values: Sequence[float]) -> float | None:
    """Half of Student's 95 % t-interval, None below two seeds."""
    return half_width(values) if len(values) > 1 else None


def floor(of: Metric, best: float) -> float:
    """The worst value that is drawn in its place, beside a best one."""
    if not of.higher_is_better:
        return TIMES_WORST * best
    return best - WORST if of.percent else -math.inf


def score_limits(arms: Sequence[Arm], means: Sequence[Array]) -> tuple[float, float]:
    """(bottom, top) of an axis on which the ends of learning curves can be told apart: early epochs may be cut off.

    Args:
        arms: of one setting.
        means: of each, the metric over epochs.
    """
    of = metric_of(arms)
    sign = 1 if of.higher_is_better else -1
    curves = [sign * mean[np.isfinite(mean)] for mean in means]
    curves = [curve for curve in curves if len(curve)] or [np.zeros(1)]
    best = max(curve[-1] for curve in curves)
    drawn = [curve for curve in curves if curve[-1] >= sign * floor(of, sign * best)] or curves
    early = 0.25 if of.higher_is_better else 0.5  # perplexities fall from thousands
    low = min(min(np.quantile(curve, early), curve[-1]) for curve in drawn)
    high = max(float(curve.max()) for curve in drawn)
    span = (high - low) or abs(high) or 1.0
    bottom, top = sorted((sign * (low - 0.1 * span), sign * (high + 0.12 * span)))
    if of.percent:
        return max(bottom, 0.0), min(top, 100.5)
    if low * sign >= 0:
        return max(bottom, 0.0), top
    return bottom, top


def seeds(arms: Sequence[Arm]) -> str:
    """`n = 3 (seeds 0, 1, 2)`; `n = 1` where nobody tells the seeds."""
    numbers = sorted({seed for arm in arms for seed in arm.seeds if seed is not None})
    counts = "/".join(map(str, sorted({arm.n for arm in arms})))
    if not numbers:
        return f"n = {counts}"
    word = "seeds" if len(numbers) > 1 else "seed"
    return f"n = {counts} ({word} {', '.join(map(str, numbers))})"


def several(arms: Sequence[Arm]) -> bool:
    """Whether there is anything to draw intervals of."""
    return max(arm.n for arm in arms) > 1


def option(config: dict[str, Any], key: str) -> Any:
    """An option by its dotted key; None where there is none."""
    for part in key.split("."):
        config = (config or {}).get(part)  # type: ignore[assignment]
    return config
