"""Which layer used which level in which epoch: the grid, for files and for the page, its maps, and codebooks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import offset_copy

from accordion_bench.methods.labels import knob_of, pair_of, show_level
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.read.load import Run
from accordion_bench.report.render.captions import heading, without_bytes
from accordion_bench.report.render.figures.curves import (
    curves,
    footnote,
    handles,
    limits_of,
    points,
    points_note,
    sent_axis,
)
from accordion_bench.report.render.figures.scales import (
    EPOCHS,
    SENT,
    column,
    end_limits,
    log_axis,
    metric_of,
    name_epochs,
    scores,
)
from accordion_bench.report.render.figures.sheet import AXIS, Sheet
from accordion_bench.report.render.looks import looks
from accordion_bench.report.render.rebuilt import dense_layers, lr_drops
from accordion_bench.runs.untrusted import printable

DENSE = "#DDDDDD"  # of layers that travel dense at a level
LADDER, DARK, LIGHT = "viridis", 0.15, 0.75  # the strongest level and the weakest one: no method has these colours
LETTERS = 80  # of a layer's name


@dataclass(frozen=True)
class LevelGrid:
    """The levels of an arm's first seed.

    Args:
        layers: as they are shown, in the network's order.
        places: per layer and epoch, which of `names` holds; None where a row has no level.
        names: of the levels from strong to weak, then of what travels dense.
        colours: of each, as #RRGGBB.
    """

    layers: Sequence[str]
    places: Sequence[Sequence[int | None]]
    names: Sequence[str]
    colours: Sequence[str]


def with_levels(arms: Sequence[Arm]) -> list[Arm]:
    """Arms whose levels a policy moves."""
    maps = {arm.label: levels_by_layer(arm.runs[0]) for arm in arms}
    moved = {label: {level for row in own.values() for level in row} for label, own in maps.items()}
    return [arm for arm in arms if len(moved[arm.label]) > 1 or (pair_of(arm.config) and moved[arm.label])]


def levels_by_layer(run: Run) -> dict[str, list[float | None]]:
    """Per layer, in the network's order, the level of each epoch; {} where no policy drives levels."""
    plans = [(row.get("plan") or {}).get("levels") or {} for row in run.rows]
    if not run.config.get("adaptive") or not any(plans):
        return {}
    return {layer: [plan.get(layer) for plan in plans] for layer in plans[0]}


def level_colours(arms: Sequence[Arm]) -> dict[tuple[str, float], str]:
    """(knob, level) -> its colour in all figures of a setting, whichever of the arms use it.

    From dark (strong) to light (weak), as far apart as they can be.

    Args:
        arms: of the setting.
    """
    found: dict[str, set[float]] = {}
    for arm in arms:
        found.setdefault(knob_of(arm.config["compressor"]), set()).update(_ladder(arm.runs[0]))
    return {
        (knob, level): _colour(i / max(len(levels) - 1, 1))
        for knob, levels in found.items()
        for i, level in enumerate(sorted(levels))
    }


def level_grid(arm: Arm, arms: Sequence[Arm]) -> LevelGrid:
    """The map of an arm whose levels a policy moves.

    Args:
        arm: whose.
        arms: of its setting, which share the colours of their levels.
    """
    run, knob = arm.runs[0], knob_of(arm.config["compressor"])
    by_layer, ladder = levels_by_layer(run), sorted(_ladder(run))
    dense = {level: dense_layers(run.config, level) & by_layer.keys() for level in _used(by_layer)}
    place = {level: i for i, level in enumerate(ladder)}

    def number(layer: str, level: float | None) -> int | None:
        if level is None:
            return None
        return len(ladder) if layer in dense[level] else place[level]

    ends = {ladder[0]: " (strong)", ladder[-1]: " (weak)"} if len(ladder) > 1 else {}
    names = [show_level(knob, level) + ends.get(level, "") for level in ladder]
    colours = level_colours(arms)
    shades = [colours[knob, level] for level in ladder]
    if too_little := [level for level in sorted(dense, reverse=True) if dense[level]]:
        names.append(f"dense: {show_level(knob, *too_little)} saves too little")
        shades.append(DENSE)
    places = [[number(layer, level) for level in row] for layer, row in by_layer.items()]
    return LevelGrid([shown(layer) for layer in by_layer], places, names, shades)


def shown(layer: str) -> str:
    """A layer's name where there is little room."""
    return printable(layer.removesuffix(".weight"), LETTERS)


def _ladder(run: Run) -> set[float]:
    """The levels of a run's map; of a pair both, though only one may be used."""
    used = _used(levels_by_layer(run))
    pair = set(pair_of(run.config) or [])
    return pair if used and pair >= used else used


def _used(by_layer: Mapping[str, Sequence[float | None]]) -> set[float]:
    return {level for row in by_layer.values() for level in row if level is not None}


def _colour(share: float) -> str:
    """The colour at a share of the ladder's length."""
    return str(mpl.colors.to_hex(mpl.colormaps[LADDER](DARK + share * (LIGHT - DARK))))


LABELLED = 24  # layers at most that have their names beside them


def level_map(axes: Axes, arm: Arm, arms: Sequence[Arm]) -> tuple[list[Any], str]:
    """Layers by epochs of an arm's first seed: colours are levels, triangles decisions, lines learning-rate drops.

    Args:
        axes: to draw on.
        arm: whose.
        arms: of its setting, which share the colours of their levels.

    Returns:
        the entries of its legend, and its title.
    """
    run, grid = arm.runs[0], level_grid(arm, arms)
    epochs, bottom, drops = len(run.rows), len(grid.layers) - 0.5, lr_drops(run)
    rgba: dict[int | None, tuple[float, ...]] = {None: (1.0, 1.0, 1.0, 1.0)}
    rgba |= dict(enumerate(map(mpl.colors.to_rgba, grid.colours)))
    squares = np.array([[rgba[place] for place in row] for row in grid.places])
    axes.imshow(squares, aspect="auto", interpolation="nearest", extent=(0.5, epochs + 0.5, bottom, -0.5))
    axes.vlines([epoch + 0.5 for epoch in drops], -0.5, bottom, color="black", linestyle="--", linewidth=1)
    decided = [row["epoch"] + 1.5 for row in run.rows if row.get("decisions")]
    above = offset_copy(axes.get_xaxis_transform(), axes.get_figure(root=True), y=4, units="points")
    axes.plot(decided, [1] * len(decided), "v", color="black", markersize=2.5, clip_on=False, transform=above)

    step = math.ceil(len(grid.layers) / LABELLED)
    axes.set_yticks(range(0, len(grid.layers), step), grid.layers[::step])
    if len(grid.layers) <= LABELLED:
        axes.hlines(np.arange(len(grid.layers) - 1) + 0.5, 0.5, epochs + 0.5, color="white", linewidth=0.5)
    axes.tick_params(axis="y", which="both", length=0)
    axes.spines[:].set_visible(False)
    axes.set_ylim(bottom, -0.5)
    name_epochs(axes, epochs)
    axes.set_ylabel("layer")
    named = zip(grid.names, grid.colours, strict=True)
    handles: list[Any] = [Patch(color=colour, label=name) for name, colour in named]
    if drops:
        handles.append(Line2D([], [], color="black", linestyle="--", linewidth=1, label="learning rate drops"))
    if decided:
        handles.append(Line2D([], [], color="black", linestyle="", marker="v", markersize=3, label="decision"))
    return handles, arm.label


MAPS = 4  # arms at most: one more says little, and takes a page
FAINT = 0.4  # opacity of the curves beside where they end
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
            path = {"color": look.colour, "linestyle": look.line, "linewidth": 0.9, "alpha": FAINT, "zorder": 1}
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


def codebooks(arms: Sequence[Arm]) -> Figure | None:
    """One panel for each number of bits of an arm whose policy fits levels: those above 0, epoch by epoch."""
    books = [
        (arm, look, bits, positive)
        for arm, look in zip(arms, looks(arms), strict=True)
        for bits, positive in levels_by_epoch(arm.runs[0]).items()
    ]
    if not books:
        return None
    shown = books[:MAPS]
    sheet = Sheet(len(shown))
    lowest = min(level for *_, positive in shown for row in positive for level in row)
    for axes, (arm, look, bits, positive) in zip(sheet.panels, shown, strict=True):
        epochs = np.arange(1, len(positive) + 1)
        for of_one in zip(*positive, strict=True):
            axes.step(epochs, of_one, where="mid", color=look.colour)
        log_axis(axes, lowest, 1.0)
        axes.set_ylim(lowest / 1.3, 1.3)
        axes.set_xlabel(EPOCHS)
        axes.set_ylabel("level [of the norm, log scale]")
        axes.grid()
        sheet.titles[axes] = f"{arm.label}, {bits} bits"
    more = f" {len(books) - len(shown)} more codebooks are not shown." if len(books) > len(shown) else ""
    note = f"{heading(arms[0])}; one seed of each arm; levels above 0 of each epoch, those below mirror them."
    return sheet.finish(note + more)


def levels_by_epoch(run: Run) -> dict[str, list[list[float]]]:
    """By number of bits the levels above 0 [epochs, levels]; {} where no policy has moved any."""
    books = [(row.get("plan") or {}).get("codebooks") or {} for row in run.rows]
    kept = [bits for bits in books[0] if all(bits in own for own in books)]
    found = {bits: [[level for level in own[bits] if level > 0] for own in books] for bits in kept}
    return {bits: rows for bits, rows in found.items() if len({tuple(row) for row in rows}) > 1}
