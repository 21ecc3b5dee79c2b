"""Learning curves: the metric against epochs, bytes and measured time."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.ranking import apart
from accordion_bench.report.compare.timed import communicates
from accordion_bench.report.render.captions import heading, without_bytes
from accordion_bench.report.render.figures.limits import curve_limits
from accordion_bench.report.render.figures.marks import (
    EPOCHS,
    SENT,
    bytes_axis,
    end_marker,
    entry,
    interval_bar,
    name_height,
)
from accordion_bench.report.render.figures.series import (
    Array,
    column,
    ends,
    interval,
    scores,
    seeds,
    several,
    shown_end,
)
from accordion_bench.report.render.figures.sheet import Sheet
from accordion_bench.report.render.looks import Look, looks

TOGETHER = 8  # arms, beyond which their curves hide each other in one panel
MARKS = 4  # small markers on a curve
PAYLOAD = "payload per worker [bytes, log scale]"

Drawn = tuple[Arm, Look]


def accuracy_epoch(arms: Sequence[Arm]) -> Figure | None:
    """The metric against epochs."""
    return _figure(
        arms, lambda arm: column(arm, "epoch") + 1, EPOCHS, bars=False
    )  # all end at one place, each bar upon the others


def accuracy_bytes(arms: Sequence[Arm]) -> Figure | None:
    """The metric against what one worker has handed to the collectives."""
    return _figure(arms, lambda arm: column(arm, "payload_bytes"), PAYLOAD)


def accuracy_wire(arms: Sequence[Arm]) -> Figure | None:
    """The metric against what one worker's own link has sent."""
    return _figure(arms, lambda arm: column(arm, "wire_bytes"), SENT)


def accuracy_time(arms: Sequence[Arm]) -> Figure | None:
    """The metric against measured time, where all arms have measured their communication."""
    if not all(map(communicates, arms)):
        return None
    return _figure(arms, lambda arm: column(arm, "seconds"), "measured training time [s]")


def _figure(arms: Sequence[Arm], x: Callable[[Arm], Array], label: str, bars: bool = True) -> Figure | None:
    """One panel, or several with dense in each where there are many arms."""
    shown = [pair for pair in zip(arms, looks(arms), strict=True) if "bytes" not in label or pair[0].sends()]
    if not shown or too_short(arms):
        return None
    parts = panes(shown)
    sheet = Sheet(len(parts))
    limits, xs = limits_of(shown), {arm.label: x(arm) for arm, _ in shown}
    for axes, part in zip(sheet.panels, parts, strict=True):
        if "bytes" in label:
            sent_axis(axes, shown, xs, limits)
        curves(axes, part, xs, limits, bars)
        axes.set_xlabel(label)
    note = footnote(arms, bars) + (without_bytes(arms) if "bytes" in label else "")
    return sheet.finish(f"{heading(arms[0])}; {note}", handles(shown))


def curves(
    axes: Axes, shown: Sequence[Drawn], costs: Mapping[str, Array], limits: tuple[float, float], bars: bool = True
) -> None:
    """One curve per arm: mean over the seeds epoch by epoch, band = their range, marker = end with 95 % t-interval.

    Dense lies below all others, whose dashes let what is below them show through.

    Args:
        axes: to draw on.
        shown: arms with their looks.
        costs: by label, an arm's values [seeds, epochs] on the other axis.
        limits: of the metric's axis.
        bars: whether intervals are drawn.
    """
    axes.set_ylim(limits)
    for i, (arm, look) in enumerate(shown):
        xs, ys = costs[arm.label].mean(axis=0), scores(arm)
        mean, last = ys.mean(axis=0), ends(arm)
        every = max(len(xs) // MARKS, 1)
        axes.plot(xs, mean, color=look.colour, linestyle=look.line, zorder=2 if arm.dense else 3, gid="curve")
        some = {**look.point, "markevery": (i * every // len(shown), every), "markersize": 3.5}
        axes.plot(xs, mean, zorder=4, **some)
        if arm.n > 1:
            low, high = ys.min(axis=0), ys.max(axis=0)
            axes.fill_between(xs, low, high, color=look.colour, alpha=0.13, linewidth=0, zorder=1)
        x, y = float(xs[-1]), float(np.mean(last))
        if bars:
            interval_bar(axes, x, y, interval(last), look.colour)
        end_marker(axes, x, y, look, shown_end(arm))
    name_height(axes, [arm for arm, _ in shown])
    axes.grid()


def sent_axis(axes: Axes, shown: Sequence[Drawn], costs: Mapping[str, Array], limits: tuple[float, float]) -> None:
    """Bytes, from where the curves come into the metric's limits."""
    seen = []
    for arm, _ in shown:
        xs, ys = costs[arm.label].mean(axis=0), scores(arm).mean(axis=0)
        seen.append(xs[(xs > 0) & ((limits[0] <= ys) & (ys <= limits[1]) | (xs == xs[-1]))])
    spent = np.concatenate(seen)
    if len(spent):
        bytes_axis(axes, float(spent.min()), float(spent.max()))
        axes.set_xlim(spent.min() / 1.3, spent.max() * 1.3)


def limits_of(shown: Sequence[Drawn]) -> tuple[float, float]:
    """(low, high) of the metric's axis for these arms."""
    arms = [arm for arm, _ in shown]
    return curve_limits(arms, [scores(arm).mean(axis=0) for arm in arms])


def panes(shown: Sequence[Drawn]) -> list[list[Drawn]]:
    """Arms by panel: all in one, or a few in each, of one colour each, with dense ones in all."""
    if len(shown) <= TOGETHER:
        return [list(shown)]
    dense = [pair for pair in shown if pair[0].dense][: TOGETHER // 2]
    rest = [pair for pair in shown if pair not in dense]
    most = len(dense) + math.ceil(len(rest) / math.ceil(len(rest) / (TOGETHER - len(dense))))
    found: list[list[Drawn]] = []
    for arm, look in rest:
        room = (pane for pane in found if len(pane) < most and look.colour not in {other.colour for _, other in pane})
        pane = next(room, None)
        if pane is None:
            found.append(pane := [*dense])
        pane.append((arm, look))
    return found


def handles(shown: Sequence[Drawn], line: bool = True) -> list[Any]:
    """The legend: every arm with the metric after its last epoch."""
    return [entry(look, f"{arm.label}: {shown_end(arm)}", line) for arm, look in shown]


def footnote(arms: Sequence[Arm], bars: bool = True) -> str:
    """Seeds, and what lines, bands and markers are."""
    lines = "; lines: mean over the seeds; bands: their range" if several(arms) else ""
    if several(arms) and bars:
        lines += "; bars: Student's 95 % t-interval, arrows: it goes on outside"
    cut = "; early epochs are cut off" if apart(arms) else ""
    return f"{seeds(arms)}{lines}; large markers: after the last epoch{cut}."


def too_short(arms: Sequence[Arm]) -> bool:
    """Whether there is no curve to see."""
    return all(len(run.rows) < 2 for arm in arms for run in arm.runs)
