"""What the axes of several figures share: the numbers behind them, their limits, markers, intervals and names."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from accordion_bench.options.units import human_bytes
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.intervals import apart, half_width
from accordion_bench.report.compare.show import show_value
from accordion_bench.report.render.figures.sheet import SMALL
from accordion_bench.report.render.looks import ArmLook
from accordion_bench.runs.metrics import LOSSES, Metric, metric

Array = NDArray[np.float64]
Place = tuple[float, float]  # x and y


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
    """`n = 3 (seeds 0, 1, 2)`; `n = 3` where they are not known; of one seed that nothing is ranked."""
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


LARGEST, SMALLEST = 8.0, 5.0  # points, of markers
EPOCHS = "training [epochs]"
SENT = "sent per worker [bytes, log scale]"  # as tables call it: what its own link sends
OUTSIDE = {"x": "<>", "y": "v^"}  # arrows at the low and at the high edge


def entry(look: ArmLook, label: str, line: bool = True) -> Line2D:
    """An arm in a legend."""
    point = look.point if not line else {**look.point, "linestyle": look.line}
    return Line2D([], [], label=label, **point)


def interval_bar(axes: Axes, place: Place, half: float | None, colour: str, across: bool = False) -> None:
    """From y - half to y + half, or from x - half to x + half; nothing where there is no interval.

    The axes' limits are final: what leaves them is cut, and an arrow says so. So is what leaves 100 percent.
    Plain lines: matplotlib's own error bars take ten times as long.
    """
    at, other, (low, high), arrows, cap = _along(axes, place, across)
    if half is None or not low <= at <= high:
        return
    ends = at - half, at + half
    seen = max(ends[0], low), min(ends[1], HUNDRED if high == MOST else high)
    options: dict[str, Any] = {"color": colour, "linewidth": 0.9, "zorder": 3.5, "gid": "interval"}
    axes.plot(*_placed(seen, (other, other), across), **options)
    for end, edge, arrow in zip(ends, seen, arrows, strict=True):
        mark = {"marker": cap} if end == edge else {"marker": arrow, "clip_on": False, "gid": "cut"}
        axes.plot(*_placed((edge,), (other,), across), **{**options, "markersize": 4, **mark})


def sizes(count: int) -> list[float]:
    """Of the markers of so many arms, in the order in which they are drawn: what lies below another is larger."""
    return [LARGEST - (LARGEST - SMALLEST) * i / max(count - 1, 1) for i in range(count)]


def end_marker(
    axes: Axes, place: Place, look: ArmLook, number: str, across: bool = False, size: float = SMALLEST
) -> None:
    """An arm's own marker; at the edge an arrow with its number where it lies outside of the axes, whose limits are
    final."""
    at, other, (low, high), arrows, _ = _along(axes, place, across)
    if not math.isfinite(at):
        return
    if low <= at <= high:
        axes.plot([place[0]], [place[1]], zorder=5, gid="end", markersize=size, **look.point)
        return
    edge, arrow = (low, arrows[0]) if at < low else (high, arrows[1])
    ((place_x,), (place_y,)) = _placed((edge,), (other,), across)
    options = {**look.point, "marker": arrow, "clip_on": False, "gid": "outside"}
    axes.plot([place_x], [place_y], zorder=5, **options)
    inwards = (6 if at < low else -6) if across else 6
    aligned: dict[str, Any] = {"ha": "right" if across and at > high else "left", "va": "center"}
    axes.annotate(number, (place_x, place_y), (inwards, 0), textcoords="offset points", fontsize=SMALL, **aligned)


def _along(axes: Axes, place: Place, across: bool) -> tuple[float, float, Place, str, str]:
    """(place on the metric's axis, place on the other one, limits, arrows, cap of an interval)."""
    (x, y), (low, high) = place, sorted(axes.get_xlim() if across else axes.get_ylim())
    return (x, y, (low, high), OUTSIDE["x"], "|") if across else (y, x, (low, high), OUTSIDE["y"], "_")


def _placed(along: Sequence[float], other: Sequence[float], across: bool) -> tuple[Sequence[float], Sequence[float]]:
    return (along, other) if across else (other, along)


def bytes_axis(axes: Axes, low: float, high: float) -> None:
    """A logarithmic axis of bytes, numbered closely enough for its range."""
    _logarithmic(axes.xaxis, axes.set_xscale, low, high, lambda value, _: human_bytes(value))


def log_axis(axes: Axes, low: float, high: float) -> None:
    """A logarithmic vertical axis, numbered likewise; all its numbers are written in one way."""
    plain = low >= 1e-3 and high < 1e5
    _logarithmic(axes.yaxis, axes.set_yscale, low, high, lambda value, _: f"{value:g}" if plain else _powers(value))


def _powers(value: float) -> str:
    """`1e-7`, `2e3`."""
    digits, _, power = f"{value:.0e}".partition("e")
    return f"{digits}e{int(power)}"


def _logarithmic(axis: Any, set_scale: Any, low: float, high: float, number: Any) -> None:
    set_scale("log")
    close = high < 4 * low  # too close for powers of ten and their parts
    axis.set_major_locator(MaxNLocator(4) if close else LogLocator(10, (1,) if high > 50 * low else (1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(number))
    axis.set_minor_locator(NullLocator())


def numbered(axes: Axes, values: Sequence[float], names: Sequence[str]) -> None:
    """A logarithmic axis that is numbered at these values, and nowhere else."""
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(values, names)
    axes.set_xlim(values[0] / 1.3, values[-1] * 1.3)


def name_epochs(axes: Axes, epochs: int) -> None:
    """The axis of epochs of a figure that has something in each of them: whole numbers, half an epoch of margin."""
    axes.set_xlim(0.5, epochs + 0.5)
    whole_epochs(axes)
    axes.set_xlabel(EPOCHS)


def whole_epochs(axes: Axes) -> None:
    """No half epoch is numbered."""
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def metric_label(arms: Sequence[Arm]) -> str:
    """The name of an axis: `test accuracy [%]`, `validation bits per byte [-], lower is better`."""
    of = metric_of(arms)
    split = "validation" if (arms[0].config.get("dataset") or {}).get("metric_split") == "valid" else "test"
    name = of.words if of.name in LOSSES else f"{split} {of.words}"
    return f"{name} [{of.unit or '-'}]" + ("" if of.higher_is_better else ", lower is better")


def name_height(axes: Axes, arms: Sequence[Arm]) -> None:
    """The metric's name beside its axis, in two lines: one may be longer than a panel is high."""
    axes.set_ylabel(metric_label(arms).replace("], ", "],\n"))
