"""The numbers behind the figures: columns of an arm's runs as arrays, ends, intervals and seeds."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.intervals import half_width
from accordion_bench.report.compare.show import show_value
from accordion_bench.runs.metrics import Metric, metric

Array = NDArray[np.float64]


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


def seeds(arms: Sequence[Arm]) -> str:
    """`n = 3 (seeds 0, 1, 2)`; `n = 3` where nobody tells them; of one seed that nothing is ranked."""
    numbers = sorted({seed for arm in arms for seed in arm.seeds if seed is not None})
    text = f"n = {'/'.join(map(str, sorted({arm.n for arm in arms})))}"
    if numbers:
        text += f" ({'seeds' if len(numbers) > 1 else 'seed'} {', '.join(map(str, numbers))})"
    return text if several(arms) else f"{text}: one run of each arm, so nothing is ranked"


def several(arms: Sequence[Arm]) -> bool:
    """Whether there is anything to draw intervals of."""
    return max(arm.n for arm in arms) > 1


def shown_end(arm: Arm) -> str:
    """The metric after the last epoch in words: `91.00 ± 2.48 %`."""
    half = half_width(arm.values("metric"))
    return show_value(metric_of([arm]), arm.mean("metric"), half)
