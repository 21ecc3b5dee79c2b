"""Level maps below each other, and one beside the learning curves."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from accordion_bench.methods.labels import pair_of
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.render.captions import heading, without_bytes
from accordion_bench.report.render.figures.curves import (
    EPOCHS,
    PAYLOAD,
    curves,
    footnote,
    handles,
    limits_of,
    sent_axis,
)
from accordion_bench.report.render.figures.level_map import level_map, levels_by_layer
from accordion_bench.report.render.figures.rows import AXIS
from accordion_bench.report.render.figures.series import column
from accordion_bench.report.render.figures.sheet import Sheet
from accordion_bench.report.render.looks import looks

MAPS = 4  # arms at most: one more says little, and takes a page
TALLEST = 3.0  # inches of a map


def with_levels(arms: Sequence[Arm]) -> list[Arm]:
    """Arms whose levels a policy moves."""
    maps = {arm.label: levels_by_layer(arm.runs[0]) for arm in arms}
    moved = {label: {level for row in own.values() for level in row} for label, own in maps.items()}
    return [arm for arm in arms if len(moved[arm.label]) > 1 or (pair_of(arm.config) and moved[arm.label])]


def level_maps(adaptive: Sequence[Arm]) -> Figure:
    """One level map below the other, each of the arm's first seed."""
    shown = adaptive[:MAPS]
    sheet = Sheet(len(shown), [_height(arm) for arm in shown], columns=1)
    for axes, arm in zip(sheet.panels, shown, strict=True):
        sheet.legends[axes], sheet.titles[axes] = level_map(axes, arm)
    left_out = f" {len(adaptive) - len(shown)} more arms have level maps, too." if len(adaptive) > len(shown) else ""
    return sheet.finish(f"{heading(adaptive[0])}; level of each layer in each epoch, one seed of each arm.{left_out}")


def side_by_side(arms: Sequence[Arm], adaptive: Sequence[Arm] = ()) -> Figure:
    """The metric against bytes on the left; beside it the level maps of `adaptive`.

    Where no arm has a place on an axis of bytes, the metric against epochs.
    """
    shown = [pair for pair in zip(arms, looks(arms), strict=True) if pair[0].sends("payload_bytes")]
    by_bytes = bool(shown)
    shown = shown or list(zip(arms, looks(arms), strict=True))
    height = max([2.6, *map(_height, adaptive)])
    sheet = Sheet(1 + len(adaptive), height)
    left, *maps = sheet.panels
    costs = {arm.label: column(arm, "payload_bytes") if by_bytes else column(arm, "epoch") + 1 for arm, _ in shown}
    limits = limits_of(shown)
    if by_bytes:
        sent_axis(left, shown, costs, limits)
    curves(left, shown, costs, limits, bars=by_bytes)
    left.set_xlabel(PAYLOAD if by_bytes else EPOCHS)
    sheet.legends[left] = handles(shown)
    for axes, arm in zip(maps, adaptive, strict=True):
        sheet.legends[axes], sheet.titles[axes] = level_map(axes, arm)
    note = footnote(arms, bars=by_bytes) + (without_bytes(arms) if by_bytes else "")
    beside = " The map: the level of each layer in each epoch, one seed." if maps else ""
    return sheet.finish(f"{heading(arms[0])}; {note}{beside}")


def _height(arm: Arm) -> float:
    return min(max(1.0, 0.14 * len(levels_by_layer(arm.runs[0]))), TALLEST) + AXIS
