"""Figures of layers over training: level maps, codebooks, gradient norms and compression errors."""

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

from accordion_bench.methods.labels import detects, drives, knob_of, pair_of, policies_of, show_level
from accordion_bench.options.units import counted
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.parallel import dense_layers, lr_drops
from accordion_bench.report.read import Run
from accordion_bench.report.render import with_looks
from accordion_bench.report.render.captions import heading, without_bytes
from accordion_bench.report.render.figures.curves import (
    curves,
    footnote,
    handles,
    panes,
    points,
    points_note,
    sent_axis,
)
from accordion_bench.report.render.figures.sheet import (
    AXIS,
    SENT,
    Sheet,
    column,
    curve,
    curve_limits,
    end_limits,
    entry,
    epochs_axis,
    log_axis,
    metric_of,
    scores,
    seeds,
    several,
)
from accordion_bench.runs.untrusted import printable

DENSE = "#DDDDDD"  # colour of layers that are sent dense at a level
LADDER, DARK, LIGHT = "viridis", 0.15, 0.75  # from the strongest to the weakest level; no method's colours
LETTERS = 80  # most characters of a layer's name


@dataclass(frozen=True)
class LevelGrid:
    """Level map of an arm's first seed.

    Args:
        layers: displayed names, in the network's order.
        places: by layer and epoch, the index in `names`; None if a row has no level.
        names: names of the levels from strong to weak, followed by that of layers sent dense.
        colours: colour of each name, as #RRGGBB.
    """

    layers: Sequence[str]
    places: Sequence[Sequence[int | None]]
    names: Sequence[str]
    colours: Sequence[str]


def with_levels(arms: Sequence[Arm]) -> list[Arm]:
    """Return the arms whose levels are changed by a policy; those whose layers differ first, as few are drawn."""
    maps = {arm.label: levels_by_layer(arm.runs[0]) for arm in arms}
    moved = {label: {level for row in own.values() for level in row} for label, own in maps.items()}
    found = [arm for arm in arms if len(moved[arm.label]) > 1 or (pair_of(arm.config) and moved[arm.label])]
    return sorted(found, key=lambda arm: not _layers_differ(maps[arm.label]))


def _layers_differ(by_layer: Mapping[str, Sequence[float | None]]) -> bool:
    """Whether some epoch has several levels; a schedule that treats all layers alike has not."""
    return any(len(set(of_epoch)) > 1 for of_epoch in zip(*by_layer.values(), strict=True))


def levels_by_layer(run: Run) -> dict[str, list[float | None]]:
    """Return, by layer in the network's order, the level of each epoch; {} if no policy controls levels."""
    plans = [(row.get("plan") or {}).get("levels") or {} for row in run.rows]
    if not run.config.get("adaptive") or not any(plans):
        return {}
    return {layer: [plan.get(layer) for plan in plans] for layer in plans[0]}


def level_colours(arms: Sequence[Arm]) -> dict[tuple[str, float], str]:
    """Return (knob, level) -> colour, common to all figures of a setting, from dark (strong) to light (weak)."""
    found: dict[str, set[float]] = {}
    for arm in arms:
        found.setdefault(knob_of(arm.config["compressor"]), set()).update(_ladder(arm.runs[0]))
    shades = mpl.colormaps[LADDER]
    return {
        (knob, level): str(mpl.colors.to_hex(shades(DARK + i / max(len(levels) - 1, 1) * (LIGHT - DARK))))
        for knob, levels in found.items()
        for i, level in enumerate(sorted(levels))
    }


def level_grid(arm: Arm, arms: Sequence[Arm]) -> LevelGrid:
    """Return the level map of an arm whose levels are changed by a policy; `arms` of its setting share the colours."""
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
    """Return a layer's name, shortened for display."""
    return printable(layer.removesuffix(".weight"), LETTERS)


def _ladder(run: Run) -> set[float]:
    """Return the levels of a run's map; both levels of a pair, even if only one was used."""
    used = _used(levels_by_layer(run))
    pair = set(pair_of(run.config) or [])
    return pair if used and pair >= used else used


def _used(by_layer: Mapping[str, Sequence[float | None]]) -> set[float]:
    return {level for row in by_layer.values() for level in row if level is not None}


LABELLED = 24  # largest number of layers of which each is labelled


def level_map(axes: Axes, arm: Arm, arms: Sequence[Arm]) -> tuple[list[Any], str]:
    """Draw layers by epochs of an arm's first seed: colours are levels, triangles decisions, lines learning-rate drops.

    The arms of its setting share the colours of levels. Return the entries of its legend, and its title.
    """
    run, grid = arm.runs[0], level_grid(arm, arms)
    epochs, bottom, drops = len(run.rows), len(grid.layers) - 0.5, lr_drops(run.config, run.rows)
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
    _name_epochs(axes, epochs)
    axes.set_ylabel("layer")
    named = zip(grid.names, grid.colours, strict=True)
    handles: list[Any] = [Patch(color=colour, label=name) for name, colour in named]
    if drops:
        handles.append(Line2D([], [], color="black", linestyle="--", linewidth=1, label="learning rate drops"))
    if decided:
        handles.append(Line2D([], [], color="black", linestyle="", marker="v", markersize=3, label="decision"))
    return handles, arm.label


MAPS = 4  # most arms: further maps add little and would fill a page
FAINT = 0.4  # opacity of the curves before their end
TALLEST = 3.0  # largest height of a map in inches


def level_maps(arms: Sequence[Arm]) -> Figure | None:
    """Draw level maps below each other, each of the arm's first seed; None if no policy changes levels."""
    adaptive = with_levels(arms)
    if not adaptive:
        return None
    sheet = Sheet(len(adaptive[:MAPS]), [_height(arm) for arm in adaptive[:MAPS]], columns=1)
    for axes, arm in zip(sheet.panels, adaptive, strict=False):
        sheet.legends[axes], sheet.titles[axes] = level_map(axes, arm, arms)
    left_out = _left_out(adaptive, "arm has a level map, too", "arms have level maps, too")
    return sheet.finish(f"{heading(adaptive[0])}; level of each layer in each epoch, one seed of each arm.{left_out}")


def _left_out(drawn: Sequence[Any], one: str, several: str) -> str:
    """Return the end of a footnote: the number of those without a panel, and what they are."""
    more = len(drawn) - MAPS
    return f" {more} more {one if more == 1 else several}." if more > 0 else ""


def side_by_side(arms: Sequence[Arm]) -> Figure:
    """Draw the metric against bytes on the left, and on the right the level map of the first arm that has one.

    If no arm can be drawn on an axis of bytes, the metric is drawn against epochs.
    """
    adaptive = with_levels(arms)[:1]
    shown = [pair for pair in with_looks(arms) if pair[0].sends()]
    by_bytes = bool(shown)
    shown = shown or with_looks(arms)
    sheet = Sheet(1 + len(adaptive), max([2.6, *map(_height, adaptive)]))
    left, *maps = sheet.panels
    costs = {arm.label: column(arm, "wire_bytes") if by_bytes else column(arm, "epoch") + 1 for arm, _ in shown}
    limits = end_limits(arms) if by_bytes else curve_limits(arms)
    if by_bytes:
        sent_axis(left, shown, costs, limits)
        for arm, look in shown:  # the path to the end is less important than the end
            path = {"color": look.colour, "linestyle": look.line, "linewidth": 0.9, "alpha": FAINT, "zorder": 1}
            left.plot(costs[arm.label].mean(axis=0), scores(arm).mean(axis=0), gid="curve", **path)
        points(left, shown, [costs[arm.label][:, -1].tolist() for arm, _ in shown])
    else:
        curves(left, shown, costs, limits, bars=False)
    left.set_xlabel(SENT)
    if not by_bytes:
        epochs_axis(left)
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
    """State where an axis of percent starts if not at 0, because that exaggerates differences."""
    return f"; the axis starts at {limits[0]:.0f} %" if metric_of(arms).percent and limits[0] >= 1 else ""


def _height(arm: Arm) -> float:
    return min(max(1.0, 0.14 * len(levels_by_layer(arm.runs[0]))), TALLEST) + AXIS


def codebooks(arms: Sequence[Arm]) -> Figure | None:
    """Draw one panel for each bit width of an arm whose policy fits quantisation levels: those above 0, by epoch."""
    books = [
        (arm, look, bits, positive)
        for arm, look in with_looks(arms)
        for bits, positive in levels_by_epoch(arm.runs[0]).items()
    ]
    if not books:
        return None
    sheet = Sheet(len(books[:MAPS]))
    lowest = min(level for *_, positive in books[:MAPS] for row in positive for level in row)
    for axes, (arm, look, bits, positive) in zip(sheet.panels, books, strict=False):
        epochs = np.arange(1, len(positive) + 1)
        for of_one in zip(*positive, strict=True):
            axes.step(epochs, of_one, where="mid", color=look.colour)
        log_axis(axes, lowest, 1.0)
        epochs_axis(axes)
        axes.set_ylabel("level [of the norm, log scale]")
        axes.grid()
        sheet.titles[axes] = f"{arm.label}, {bits} bits"
    note = f"{heading(arms[0])}; one seed of each arm; levels above 0 of each epoch, those below mirror them."
    return sheet.finish(note + _left_out(books, "codebook is not shown", "codebooks are not shown"))


def levels_by_epoch(run: Run) -> dict[str, list[list[float]]]:
    """Return, by bit width, the levels above 0 [epochs, levels]; {} if no policy has changed any."""
    books = [(row.get("plan") or {}).get("codebooks") or {} for row in run.rows]
    kept = [bits for bits in books[0] if all(bits in own for own in books)]
    found = {bits: [[level for level in own[bits] if level > 0] for own in books] for bits in kept}
    return {bits: rows for bits, rows in found.items() if len({tuple(row) for row in rows}) > 1}


# ---- gradients

SHADE = "#E69F00"
NOISE = 1e-3  # relative to the median layer's norm: smaller norms are rounding errors
NAMED = 8  # largest number of layers of which each is in the legend


def norms(arms: Sequence[Arm]) -> Figure | None:
    """Draw one panel per arm that has norms: the norm of each layer's gradients, summed over an epoch, by epoch."""
    known = [arm for arm in arms if len(norms_by_layer(arm.runs[0])[0]) > 1]
    adaptive = [arm for arm in known if policies_of(arm.config)]
    drawn = adaptive + [arm for arm in known if arm.dense] if adaptive else known
    if not drawn:
        return None
    panels = drawn[:MAPS]
    sheet = Sheet(len(panels))
    seen, noise = told_apart([norms_by_layer(arm.runs[0])[1] for arm in panels])
    shares = [critical_share(arm.runs[0]) for arm in panels]
    pairs = zip(sheet.panels, panels, shares, strict=True)
    if len(values := np.concatenate([_panel(axes, arm, share, seen) for axes, arm, share in pairs])):
        for axes in sheet.panels:
            log_axis(axes, values.min() / 1.3, values.max() * 1.3, margin=1)
    sheet.titles |= {axes: arm.label for axes, arm in zip(sheet.panels, panels, strict=True)}
    why = "because they are rounding errors and no gradients"
    such = f"{counted(len(noise), 'layer')} such as {shown(noise[0])}" if noise else ""
    left_out = f" Left out, {why}: {such}, below a thousandth of the median layer's." if noise else ""
    return sheet.finish(
        f"{heading(arms[0])}; one seed of each arm. Norm of worker 0's gradients, or what the policy looks at, summed "
        "over an epoch. Shaded: critical regimes, the darker the more layers are in one."
        f"{left_out}{_left_out(drawn, 'arm has norms, too', 'arms have norms, too')}",
        _handles(seen, any(share is not None for share in shares)),
    )


def told_apart(norms: Sequence[Mapping[str, Sequence[float]]]) -> tuple[list[str], list[str]]:
    """Return (layers with a gradient, layers whose norms are rounding errors in every arm), in the network's order.

    `norms` has the norms of each arm, by layer and epoch. A bias before a BatchNorm does not affect the loss: its
    gradient is 0, and rounding leaves a millionth of the others'.
    """
    layers = list(dict.fromkeys(layer for own in norms for layer in own))
    every = [(layer, _largest(values)) for own in norms for layer, values in own.items()]
    least = NOISE * float(np.median([largest for _, largest in every if largest > 0] or [0.0]))
    seen = {layer for layer, largest in every if largest > least}
    return [layer for layer in layers if layer in seen], [layer for layer in layers if layer not in seen]


def _largest(values: Sequence[float]) -> float:
    return max((value for value in values if np.isfinite(value)), default=0.0)


def norms_by_layer(run: Run) -> tuple[list[int], dict[str, list[float]]]:
    """Return (epochs, norms by layer): measured in every epoch, or else recorded by a policy at its checks."""
    rows = [(row["epoch"], row["norms"]) for row in run.rows if row.get("norms")]
    rows = rows or [(row["epoch"], noted) for row in run.rows if (noted := _noted(row))]
    layers = rows[0][1] if rows else {}
    return [epoch for epoch, _ in rows], {layer: [own.get(layer, np.nan) for _, own in rows] for layer in layers}


def _noted(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the norms in the decision of a row; of the whole model if the policy does not use single layers."""
    for decision in (row.get("decisions") or {}).values():
        if isinstance(decision, dict) and decision.get("norm"):
            norm = decision["norm"]
            return dict(zip(decision.get("names") or ["whole model"], norm, strict=False))
    return {}


def critical_share(run: Run) -> list[float] | None:
    """Return for each epoch the share of layers treated as critical; None if no policy distinguishes regimes."""
    pair, periods = pair_of(run.config), pair_of(run.config, "period")
    plans = [row.get("plan") or {} for row in run.rows]
    if pair and all(plan.get("levels") for plan in plans):
        return [sum(level == pair[0] for level in plan["levels"].values()) / len(plan["levels"]) for plan in plans]
    for node in policies_of(run.config).values():
        if spans := node.get("critical"):  # regimes given as spans of epochs
            return [float(any(first <= epoch < end for first, end in spans)) for epoch in range(len(plans))]
    if periods:
        return [float(plan.get("period") == periods[0]) for plan in plans]
    if any(detects(node) and drives(node) == "batch" for node in policies_of(run.config).values()):
        return [float(plan.get("batch_size") == run.config["batch_size"]) for plan in plans]
    return None


def _panel(axes: Axes, arm: Arm, share: Sequence[float] | None, layers: Sequence[str]) -> np.ndarray:
    """Draw one arm; return its norms that are finite and positive."""
    epochs, by_layer = norms_by_layer(arm.runs[0])
    if share is not None:
        grid = np.zeros((1, len(share), 4))
        grid[0, :] = mpl.colors.to_rgba(SHADE)
        grid[0, :, 3] = 0.4 * np.array(share)
        span = (0.5, len(share) + 0.5, 0, 1)
        image = axes.imshow(grid, aspect="auto", extent=span, transform=axes.get_xaxis_transform(), zorder=0)
        image.set_interpolation("nearest")
    marker = "." if len(epochs) < 15 else ""
    for i, layer in enumerate(layers):
        if layer in by_layer:
            line = {"color": _of_layer(i, len(layers)), "linewidth": 0.8, "marker": marker, "markersize": 3}
            axes.plot(np.array(epochs) + 1, by_layer[layer], **line)
    _name_epochs(axes, len(arm.runs[0].rows))
    axes.set_ylabel("gradient norm [-, log scale]")
    values = np.array([norm for layer in layers for norm in by_layer.get(layer, ())], dtype=float)
    return values[np.isfinite(values) & (values > 0)]


def _name_epochs(axes: Axes, epochs: int) -> None:
    """Set up an axis of epochs with integer ticks and a margin of half an epoch."""
    axes.set_xlim(0.5, epochs + 0.5)
    epochs_axis(axes)


def _of_layer(layer: int, layers: int) -> Any:
    return mpl.colormaps["viridis"](layer / max(layers - 1, 1) * 0.9)


def _handles(layers: Sequence[str], shaded: bool) -> list[Any]:
    """Return legend entries of all layers, or of the first, the middle and the last one."""
    picked = range(len(layers)) if len(layers) <= NAMED else (0, len(layers) // 2, len(layers) - 1)
    places = {0: " (first)", len(layers) - 1: " (last)"} if len(layers) > NAMED else {}
    found: list[Any] = [
        Line2D([], [], color=_of_layer(i, len(layers)), label=shown(layers[i]) + places.get(i, "")) for i in picked
    ]
    if shaded:
        found.append(Patch(facecolor=SHADE, alpha=0.4, label="critical"))
    return found


def variance(arms: Sequence[Arm]) -> Figure | None:
    """Draw ||x - sent||^2 / ||x||^2 in one exchange per epoch: the normalised variance of an unbiased quantiser."""
    errors = {arm.label: column(arm, "compression_error") for arm in arms}
    lossy = [pair for pair in with_looks(arms) if (np.nan_to_num(errors[pair[0].label]) > 0).any()]
    if not lossy or all(own.shape[1] < 2 for own in errors.values()):
        return None
    parts = panes(lossy)
    sheet = Sheet(len(parts))
    everything = np.concatenate([errors[arm.label].ravel() for arm, _ in lossy])
    everything = everything[everything > 0]
    for axes, part in zip(sheet.panels, parts, strict=True):
        for arm, look in part:
            own = errors[arm.label]
            epochs = np.arange(1, own.shape[1] + 1)
            curve(axes, epochs, own, look)
            axes.plot(epochs[-1:], own.mean(axis=0)[-1:], zorder=3, **look.point)
        log_axis(axes, everything.min(), everything.max())
        epochs_axis(axes)
        axes.set_ylabel("|x - sent|² / |x|² [-, log scale]")
        axes.grid()
    bands = "; lines: mean over the seeds; bands: their range" if several(arms) else ""
    note = (
        f"{heading(arms[0])}; {seeds(arms)}{bands}; worker 0, one exchange of each epoch; of unbiased quantisers this "
        "is the normalised variance."
    )
    return sheet.finish(note, [entry(look, arm.label) for arm, look in lossy])
