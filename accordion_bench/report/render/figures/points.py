"""Where arms end: one marker each."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.render.colours import Look
from accordion_bench.report.render.figures.series import ends, floor, interval, metric_of, seeds, several
from accordion_bench.report.render.figures.style import SMALL, bytes_axis, interval_bar, metric_label

BYTES = "sent by a worker's link [bytes, log scale]"


def points(
    axes: Axes,
    shown: Sequence[tuple[Arm, Look]],
    costs: Sequence[Sequence[float]],
    bars: bool = True,
    on_front: Collection[int] | None = None,
) -> bool:
    """One marker per arm at its mean cost and its metric after the last epoch.

    Args:
        axes: to draw on.
        shown: arms with their looks.
        costs: of each arm, one per seed.
        bars: whether intervals are drawn.
        on_front: numbers of the arms that are not pale; None = all.

    Returns:
        whether an arm is too bad for its place, and drawn at the edge with its number.
    """
    arms = [arm for arm, _ in shown]
    of, arrow = metric_of(arms), worse(arms)
    means = [float(np.mean(ends(arm))) for arm in arms]
    best = max(means) if of.higher_is_better else min(means)
    worst, highest = floor(of, best), max(float(np.mean(own)) for own in costs)
    for i, (arm, look) in enumerate(shown):
        at, y = float(np.mean(costs[i])), means[i]
        errors = [interval(ends(arm)), interval(costs[i])]
        if of.better(worst, y):
            number = f"{y:.0f} %" if of.percent else f"{y:.3g}"
            right = at < 0.6 * highest  # there is room
            place: dict[str, Any] = {"textcoords": "offset points", "va": "center", "ha": "left" if right else "right"}
            axes.annotate(f"{arrow} {number}", (at, worst), (5 if right else -5, 0), fontsize=SMALL, **place)
            y, errors = worst, []
        for across, half in enumerate(errors if bars else ()):
            interval_bar(axes, at, y, half, across=bool(across), color=look.colour, alpha=0.6, zorder=2)
        axes.plot([at], [y], zorder=3, alpha=1.0 if on_front is None or i in on_front else 0.35, **look.point)
    bottom, top = axes.get_ylim()
    if of.percent:
        axes.set_ylim(max(bottom, worst - 1), min(top, 100.5))
    elif not of.higher_is_better:
        axes.set_ylim(max(bottom, 0), min(top, 1.02 * worst))
    axes.set_ylabel(metric_label(of))
    axes.grid()
    return any(of.better(worst, mean) for mean in means)


def sent_axis(axes: Axes, costs: Sequence[Sequence[float]]) -> None:
    """Bytes, from the fewest to the most."""
    means = [float(np.mean(of)) for of in costs]
    bytes_axis(axes, min(means), max(means))
    axes.set_xlabel(BYTES)


def time_axis(axes: Axes, costs: Sequence[Sequence[float]]) -> None:
    """Modelled seconds, from nothing to the most, whatever the intervals are."""
    axes.set_xlim(0, 1.15 * max(float(np.mean(of)) for of in costs) or 1)
    axes.set_xlabel("modelled time [s]")


def worse(arms: Sequence[Arm]) -> str:
    """An arrow to where worse arms are."""
    return "↓" if metric_of(arms).higher_is_better else "↑"


def points_note(arms: Sequence[Arm], bars: bool = True, at_edge: bool = False) -> str:
    """Seeds, and what markers, bars and arrows are."""
    text = f"{seeds(arms)}; after the last epoch"
    if bars and several(arms):
        text += "; bars: Student's 95 % t-interval"
    if at_edge:
        arrow = worse(arms)
        text += f"; {arrow}: further {'down' if arrow == '↓' else 'up'}, at this number"
    return text
