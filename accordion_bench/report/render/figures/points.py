"""Where arms end: one marker each."""

from collections.abc import Collection, Sequence

import numpy as np
from matplotlib.axes import Axes

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.render.figures.limits import end_limits
from accordion_bench.report.render.figures.marks import (
    SENT,
    bytes_axis,
    end_marker,
    interval_bar,
    name_height,
    sizes,
)
from accordion_bench.report.render.figures.series import ends, interval, seeds, several, shown_end
from accordion_bench.report.render.looks import Look

PALE = 0.3  # opacity of an arm that another one beats


def points(
    axes: Axes, shown: Sequence[tuple[Arm, Look]], costs: Sequence[Sequence[float]], pale: Collection[int] = ()
) -> None:
    """One marker per arm at its mean cost and its metric after the last epoch, with both intervals.

    Args:
        axes: to draw on; the limits of the costs are final.
        shown: arms with their looks.
        costs: of each arm, one per seed.
        pale: numbers of the arms that are drawn pale.
    """
    arms = [arm for arm, _ in shown]
    axes.set_ylim(end_limits(arms))
    for i, ((arm, look), size) in enumerate(zip(shown, sizes(len(shown)), strict=True)):
        before = len(axes.lines)
        x, y = float(np.mean(costs[i])), float(np.mean(ends(arm)))
        interval_bar(axes, x, y, interval(ends(arm)), look.colour)
        interval_bar(axes, x, y, interval(costs[i]), look.colour, across=True)
        end_marker(axes, x, y, look, shown_end(arm), size=size)
        for line in axes.lines[before:]:
            line.set_alpha(PALE if i in pale else None)
    name_height(axes, arms)
    axes.grid()


def sent_axis(axes: Axes, costs: Sequence[Sequence[float]]) -> None:
    """Bytes, from the fewest to the most."""
    means = [float(np.mean(of)) for of in costs]
    bytes_axis(axes, min(means), max(means))
    axes.set_xlim(min(means) / 1.3, max(means) * 1.3)
    axes.set_xlabel(SENT)


def time_axis(axes: Axes, costs: Sequence[Sequence[float]]) -> None:
    """Modelled seconds, from nothing to the most, whatever the intervals are."""
    axes.set_xlim(0, 1.15 * max(float(np.mean(of)) for of in costs) or 1)
    axes.set_xlabel("modelled time [s]")


def points_note(arms: Sequence[Arm]) -> str:
    """Seeds, and what markers and bars are."""
    bars = "; bars: Student's 95 % t-interval, arrows: it goes on outside" if several(arms) else ""
    return f"{seeds(arms)}; after the last epoch{bars}"
