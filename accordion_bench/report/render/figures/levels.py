"""Level maps below each other, and one beside the learning curves."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.render.captions import heading, without_bytes
from accordion_bench.report.render.figures.curves import (
    curves,
    footnote,
    handles,
    limits_of,
    sent_axis,
)
from accordion_bench.report.render.figures.level_map import level_map
from accordion_bench.report.render.figures.limits import end_limits
from accordion_bench.report.render.figures.marks import EPOCHS, SENT
from accordion_bench.report.render.figures.points import points, points_note
from accordion_bench.report.render.figures.rows import AXIS
from accordion_bench.report.render.figures.series import column, metric_of, scores
from accordion_bench.report.render.figures.sheet import Sheet
from accordion_bench.report.render.level_grid import levels_by_layer, with_levels
from accordion_bench.report.render.looks import looks

MAPS = 4  # arms at most: one more says little, and takes a page
LIGHT = 0.4  # opacity of the curves beside where they end
TALLEST = 3.0  # inches of a map


def level_maps(arms: Sequence[Arm]) -> Figure | None:
    """One level map below the other, each of the arm's first seed; None where no policy moves levels."""
    adaptive = with_levels(arms)
    shown = adaptive[:MAPS]
    if not shown:
        return None
    sheet = Sheet(len(shown), [_height(arm) for arm in shown], columns=1)
    for axes, arm in zip(sheet.panels, shown, strict=True):
        sheet.legends[axes], sheet.titles[axes] = level_map(axes, arm, arms)
    left_out = f" {len(adaptive) - len(shown)} more arms have level maps, too." if len(adaptive) > len(shown) else ""
    return sheet.finish(f"{heading(adaptive[0])}; level of each layer in each epoch, one seed of each arm.{left_out}")


def side_by_side(arms: Sequence[Arm]) -> Figure:
    """The metric against bytes on the left; beside it the level map of the first arm that has one.

    Where no arm has a place on an axis of bytes, the metric against epochs.
    """
    adaptive = with_levels(arms)[:1]
    shown = [pair for pair in zip(arms, looks(arms), strict=True) if pair[0].sends()]
    by_bytes = bool(shown)
    shown = shown or list(zip(arms, looks(arms), strict=True))
    height = max([2.6, *map(_height, adaptive)])
    sheet = Sheet(1 + len(adaptive), height)
    left, *maps = sheet.panels
    costs = {arm.label: column(arm, "wire_bytes") if by_bytes else column(arm, "epoch") + 1 for arm, _ in shown}
    limits = end_limits(arms) if by_bytes else limits_of(shown)
    if by_bytes:
        sent_axis(left, shown, costs, limits)
        for arm, look in shown:  # how an arm has come to its end says less than where that is
            path = {"color": look.colour, "linestyle": look.line, "linewidth": 0.9, "alpha": LIGHT, "zorder": 1}
            left.plot(costs[arm.label].mean(axis=0), scores(arm).mean(axis=0), gid="curve", **path)
        points(left, shown, [costs[arm.label][:, -1].tolist() for arm, _ in shown])
    else:
        curves(left, shown, costs, limits, bars=False)
    left.set_xlabel(SENT if by_bytes else EPOCHS)
    sheet.legends[left] = handles(shown)
    for axes, arm in zip(maps, adaptive, strict=True):
        sheet.legends[axes], sheet.titles[axes] = level_map(axes, arm, arms)
    note = footnote(arms, bars=False)
    if by_bytes:
        note = f"{points_note(arms)}; light: the way there, mean over the seeds{_starts(arms, limits)}."
        note += without_bytes(arms)
    beside = " The map: the level of each layer in each epoch, one seed." if maps else ""
    return sheet.finish(f"{heading(arms[0])}; {note}{beside}")


def _starts(arms: Sequence[Arm], limits: tuple[float, float]) -> str:
    """Where an axis of percent starts that does not start at 0, which makes differences look larger."""
    return f"; the axis starts at {limits[0]:.0f} %" if metric_of(arms).percent and limits[0] >= 1 else ""


def _height(arm: Arm) -> float:
    return min(max(1.0, 0.14 * len(levels_by_layer(arm.runs[0]))), TALLEST) + AXIS
