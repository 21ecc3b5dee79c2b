"""What stands on the axes of several figures: arms in legends, ends with their intervals, numbers and names of axes."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from accordion_bench.options.units import human_bytes
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.render.figures.limits import HUNDRED, MOST
from accordion_bench.report.render.figures.series import metric_of
from accordion_bench.report.render.figures.sheet import SMALL
from accordion_bench.report.render.looks import Look
from accordion_bench.runs.metrics import LOSSES

LARGEST, SMALLEST = 8.0, 5.0  # points, of markers
EPOCHS = "training [epochs]"
SENT = "sent per worker [bytes, log scale]"  # as tables call it: what its own link sends
OUTSIDE = {"x": "<>", "y": "v^"}  # arrows at the low and at the high edge


def entry(look: Look, label: str, line: bool = True) -> Line2D:
    """An arm in a legend."""
    point = look.point if not line else {**look.point, "linestyle": look.line}
    return Line2D([], [], label=label, **point)


def interval_bar(
    axes: Axes, x: float, y: float, half: float | None, colour: str, across: bool = False, z: float = 3.5
) -> None:
    """From y - half to y + half, or from x - half to x + half; nothing where there is no interval.

    The axes' limits are final: what leaves them is cut, and an arrow says so. So is what leaves 100 percent.
    Plain lines: matplotlib's own error bars take ten times as long.
    """
    at, other, (low, high), arrows, cap = _along(axes, x, y, across)
    if half is None or not low <= at <= high:
        return
    ends = at - half, at + half
    seen = max(ends[0], low), min(ends[1], HUNDRED if high == MOST else high)
    options: dict[str, Any] = {"color": colour, "linewidth": 0.9, "zorder": z, "gid": "interval"}
    axes.plot(*_placed(seen, (other, other), across), **options)
    for end, edge, arrow in zip(ends, seen, arrows, strict=True):
        mark = {"marker": cap} if end == edge else {"marker": arrow, "clip_on": False, "gid": "cut"}
        axes.plot(*_placed((edge,), (other,), across), **{**options, "markersize": 4, **mark})


def sizes(count: int) -> list[float]:
    """Of the markers of so many arms, in the order in which they are drawn: what lies below another is larger."""
    return [LARGEST - (LARGEST - SMALLEST) * i / max(count - 1, 1) for i in range(count)]


def end_marker(
    axes: Axes, x: float, y: float, look: Look, number: str, across: bool = False, size: float = SMALLEST
) -> None:
    """An arm's own marker; at the edge an arrow with its number where it lies outside of the axes, whose limits are
    final."""
    at, other, (low, high), arrows, _ = _along(axes, x, y, across)
    if not math.isfinite(at):
        return
    if low <= at <= high:
        axes.plot([x], [y], zorder=5, gid="end", markersize=size, **look.point)
        return
    edge, arrow = (low, arrows[0]) if at < low else (high, arrows[1])
    ((place_x,), (place_y,)) = _placed((edge,), (other,), across)
    options = {**look.point, "marker": arrow, "clip_on": False, "gid": "outside"}
    axes.plot([place_x], [place_y], zorder=5, **options)
    inwards = (6 if at < low else -6) if across else 6
    aligned: dict[str, Any] = {"ha": "right" if across and at > high else "left", "va": "center"}
    axes.annotate(number, (place_x, place_y), (inwards, 0), textcoords="offset points", fontsize=SMALL, **aligned)


def _along(axes: Axes, x: float, y: float, across: bool) -> tuple[float, float, tuple[float, float], str, str]:
    """(place on the metric's axis, place on the other one, limits, arrows, cap of an interval)."""
    low, high = sorted(axes.get_xlim() if across else axes.get_ylim())
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
