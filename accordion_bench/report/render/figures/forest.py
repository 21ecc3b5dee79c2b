"""Where all arms end: one row each."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.show import show_bytes
from accordion_bench.report.render.captions import heading
from accordion_bench.report.render.figures.limits import end_limits
from accordion_bench.report.render.figures.marks import end_marker, interval_bar, metric_label
from accordion_bench.report.render.figures.points import points_note
from accordion_bench.report.render.figures.rows import name, name_rows, sheet_of_rows
from accordion_bench.report.render.figures.series import ends, interval, shown_end
from accordion_bench.report.render.looks import looks


def forest(arms: Sequence[Arm]) -> Figure:
    """One row per arm, in the order of the table: the metric after the last epoch with its 95 % t-interval."""
    names = [f"{name(arm)}   {show_bytes(arm.mean('wire_bytes')):>8}" for arm in arms]
    sheet = sheet_of_rows(names)
    (axes,) = sheet.panels
    name_rows(axes, names)
    axes.set_xlim(end_limits(arms))
    for y, (arm, look) in enumerate(zip(arms, looks(arms), strict=True)):
        mean, half = float(np.mean(ends(arm))), interval(ends(arm))
        interval_bar(axes, mean, y, half, look.colour, across=True)
        end_marker(axes, mean, y, look, shown_end(arm), across=True)
        if arm.dense:
            axes.axvline(mean, color="black", linewidth=0.6, zorder=1)
            axes.axvspan(mean - (half or 0), mean + (half or 0), color="black", alpha=0.07, linewidth=0, zorder=0)
    axes.set_ylabel("method and bytes sent")
    axes.set_xlabel(metric_label(arms))
    dense = "; line and band: dense" if any(arm.dense for arm in arms) else ""
    return sheet.finish(f"{heading(arms[0])}; {points_note(arms)}{dense}.")
