"""How far the axis of the metric reaches: never so little that noise looks like a difference."""

import math
from collections.abc import Sequence

import numpy as np

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.ranking import apart
from accordion_bench.report.render.figures.series import Array, ends, interval, metric_of
from accordion_bench.runs.metrics import Metric

WORST = 20  # points below the best arm: worse ones stand at the edge, with their number
TIMES_WORST = 2.0  # the same for metrics without an upper end, as a factor
POINTS, IMAGES = 5, 10  # that an axis of accuracy spans at least, whichever is more
SHARE = 0.05  # of the best value, that other axes span at least
HUNDRED, MOST = 100.0, 100.5  # percent: no accuracy is above the first; where its axis ends, beside the last marker


def least_span(arms: Sequence[Arm]) -> float:
    """What an axis of the metric spans at least, as it is written: 5 points and 10 test images of accuracy."""
    of = metric_of(arms)
    if not of.percent:
        return SHARE * abs(best_of(arms))
    sizes = [size for arm in arms if isinstance(size := arm.runs[0].summary.get("test_size"), int) and size > 0]
    return max(POINTS, 100 * IMAGES / min(sizes)) if sizes else POINTS


def best_of(arms: Sequence[Arm]) -> float:
    """The best mean after the last epoch, as it is written."""
    means = [mean for arm in arms if math.isfinite(mean := float(np.mean(ends(arm))))] or [0.0]
    return max(means) if metric_of(arms).higher_is_better else min(means)


def floor(of: Metric, best: float) -> float:
    """The worst value that is drawn in its place, beside a best one."""
    if not of.higher_is_better:
        return TIMES_WORST * best
    return best - WORST if of.percent else -math.inf


def end_limits(arms: Sequence[Arm]) -> tuple[float, float]:
    """(low, high) of an axis on which arms end: all means but those far behind, and their intervals."""
    means = [(float(np.mean(ends(arm))), interval(ends(arm)) or 0.0) for arm in arms]
    return limits_of_means(means, metric_of(arms), least_span(arms), best_of(arms))


def limits_of_means(means: Sequence[tuple[float, float]], of: Metric, least: float, best: float) -> tuple[float, float]:
    """(low, high) of an axis of means with half their intervals.

    An interval may make the axis longer by as much as the means span; what is left of it is cut.

    Args:
        means: (mean, half its interval), as they are written.
        of: what they are.
        least: that the axis spans.
        best: of the means.
    """
    worst = floor(of, best)
    near = [(mean, half) for mean, half in means if math.isfinite(mean) and not of.better(worst, mean)] or [(0.0, 0.0)]
    low, high = min(mean for mean, _ in near), max(mean for mean, _ in near)
    room = max(high - low, least)
    lowest, highest = min(mean - half for mean, half in near), max(mean + half for mean, half in near)
    return spanned(max(low - room, lowest), min(high + room, highest), of, least)


def curve_limits(arms: Sequence[Arm], means: Sequence[Array]) -> tuple[float, float]:
    """(low, high) of an axis of learning curves: all epochs, or where intervals separate arms, what is near their ends.

    Args:
        arms: of one setting.
        means: of each, the metric over epochs.
    """
    of = metric_of(arms)
    sign = 1 if of.higher_is_better else -1
    curves = [sign * mean[np.isfinite(mean)] for mean in means]
    curves = [curve for curve in curves if len(curve)] or [np.zeros(1)]
    best = max(curve[-1] for curve in curves)
    near = [curve for curve in curves if curve[-1] >= sign * floor(of, sign * best)] or curves
    early = (0.25 if of.higher_is_better else 0.5) if apart(arms) else 0.0  # perplexities fall from thousands
    low = min(min(np.quantile(curve, early), curve[-1]) for curve in near)
    high = max(float(curve.max()) for curve in near)
    low_end, high_end = end_limits(arms)
    bottom, top = sorted((sign * low, sign * high))
    return spanned(min(bottom, low_end), max(top, high_end), of, least_span(arms))


def spanned(low: float, high: float, of: Metric, least: float) -> tuple[float, float]:
    """These limits with a margin, at least so far apart, and inside of what the metric can be."""
    more = max(0.16 * (high - low), least - (high - low)) / 2
    low, high = low - more, high + more
    if of.percent and high > MOST:
        low, high = min(low, MOST - least), MOST
    return (max(low, 0.0), high) if of.percent or low + more >= 0 else (low, high)
