"""Which layer used which level in which epoch, and in which colours: one text for figures in files and on the page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib as mpl

from accordion_bench.methods.labels import knob_of, pair_of, show_level
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.read.load import Run
from accordion_bench.report.read.printable import printable
from accordion_bench.report.render.rebuilt import dense_layers

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
