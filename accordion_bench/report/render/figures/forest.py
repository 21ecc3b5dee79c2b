"""Where all arms end: one row each."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.show import show_bytes
from accordion_bench.report.render.captions import heading
from accordion_bench.report.render.colours import looks
from accordion_bench.report.render.figures.series import ends, interval, metric_of, seeds, several
from accordion_bench.report.render.figures.style import PANEL, Sheet, interval_bar, lines, metric_label


def forest(arms: Sequence[Arm]) -> Figure:
    """One row per arm, fewest bytes at the top: the metric after the last epoch with its 95 % t-interval.

    Arms whose bytes are not counted stand at the end.
    """
    rows = sorted(zip(arms, looks(arms), strict=True), key=lambda row: _bytes(row[0]))
    names = [f"{name(arm)}   {show_bytes(arm.mean('payload_bytes')):>8}" for arm, _ in rows]
    rows_of_text = sum(text.count("\n") + 1 for text in names)
    sheet = Sheet(1, height=max(0.17 * rows_of_text + 0.1, 1.2), width=named_width(names))
    (axes,) = sheet.panels
    for y, (arm, look) in enumerate(rows):
        last, error = ends(arm), interval(ends(arm))
        mean = float(np.mean(last))
        interval_bar(axes, mean, y, error, across=True, color=look.colour, zorder=2)
        axes.plot([mean], [y], zorder=3, **look.point)
        if arm.dense:
            axes.axvline(mean, color="black", linewidth=0.6, zorder=1)
            axes.axvspan(mean - (error or 0), mean + (error or 0), color="black", alpha=0.07, linewidth=0, zorder=0)
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_ylabel("method and payload")
    axes.set_xlabel(metric_label(metric_of(arms)))
    axes.grid(axis="x")
    dense = "; line and band: dense" if any(arm.dense for arm in arms) else ""
    bars = "; bars: Student's 95 % t-interval" if several(arms) else ""
    return sheet.finish(heading(arms[0]), f"{seeds(arms)}; after the last epoch{bars}{dense}.")


def _bytes(arm: Arm) -> float:
    """By which rows are sorted: what is not counted at the end."""
    payload = arm.mean("payload_bytes")
    return math.inf if math.isnan(payload) else payload


def name(arm: Arm) -> str:
    """A label as the name of a row: long ones in two lines."""
    return "\n".join(lines(arm.label, 60))


def named_width(names: Sequence[str]) -> float:
    """The width in inches of a panel whose rows have these names."""
    longest = max(len(line) for text in names for line in text.splitlines())
    return min(2 * PANEL, max(PANEL, 2.2 + 0.057 * longest))
