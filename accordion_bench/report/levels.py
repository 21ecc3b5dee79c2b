"""The level map: which layer used which level in which epoch, and which layers travel dense at a level."""

import functools
import json
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from accordion_bench.report.arms import Arm
from accordion_bench.report.labels import knob_of, pair_of, show_level
from accordion_bench.report.load import Run

STRONG, WEAK, DENSE = "#56B4E9", "#D55E00", "#BBBBBB"  # Okabe and Ito's sky blue and vermilion
LR_DROP = 0.5  # a learning rate of at most this times the last one is a drop


def levels_by_layer(run: Run) -> dict[str, list[float | None]]:
    """Per layer, in the network's order, the level of each epoch; {} where no policy drives levels."""
    plans = [(row.get("plan") or {}).get("levels") or {} for row in run.rows]
    if not run.config.get("adaptive") or not any(plans):
        return {}
    return {layer: [plan.get(layer) for plan in plans] for layer in plans[0]}


def lr_drops(run: Run) -> list[int]:
    """Epochs that start with a dropped learning rate."""
    rates = [row["lr"] for row in run.rows]
    return [epoch for epoch in range(1, len(rates)) if rates[epoch] <= LR_DROP * rates[epoch - 1]]


def dense_layers(config: dict[str, Any], level: float) -> frozenset[str]:
    """Parameters that travel dense at this level; none where this version cannot rebuild the run's model."""
    return _dense_layers(json.dumps(config), level)


@functools.cache
def _dense_layers(config_json: str, level: float) -> frozenset[str]:
    from accordion_bench import config as run_config
    from accordion_bench.plan import TensorSpec

    config = json.loads(config_json)
    try:
        parts = run_config.components(config, workers=1)
        model = run_config.build_model(config, parts.dataset)
    except Exception:  # an older run's options may have no meaning today; the map is then drawn without this detail
        return frozenset()
    specs = [TensorSpec(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()]
    return frozenset(spec.name for spec in specs if not parts.wrapped.compressor.compresses(spec, level))


def level_map(axes: Axes, arm: Arm) -> None:
    """Layers by epochs of an arm's first seed: colours are levels, triangles decisions, lines learning-rate drops."""
    run = arm.runs[0]
    levels, epochs = levels_by_layer(run), len(run.rows)
    used = sorted({level for row in levels.values() for level in row if level is not None})
    dense = {level: dense_layers(run.config, level) & levels.keys() for level in used}
    colours = _colours(run, used)
    grid = np.ones((len(levels), epochs, 4))
    for i, (layer, row) in enumerate(levels.items()):
        for epoch, level in enumerate(row):
            if level is not None:
                grid[i, epoch] = mpl.colors.to_rgba(DENSE if layer in dense[level] else colours[level])
    bottom = len(levels) - 0.5
    axes.imshow(grid, aspect="auto", interpolation="nearest", extent=(-0.5, epochs - 0.5, bottom, -0.5))
    axes.vlines([epoch - 0.5 for epoch in lr_drops(run)], -0.5, bottom, color="black", linestyle="--", linewidth=1.2)
    decided = [row["epoch"] + 0.5 for row in run.rows if row.get("decisions")]
    axes.plot(decided, [-0.8] * len(decided), "v", color="black", markersize=4)

    size = 8 if len(levels) < 30 else 5
    axes.set_yticks(range(len(levels)), [layer.removesuffix(".weight") for layer in levels], fontsize=size)
    axes.set_yticks(np.arange(len(levels) - 1) + 0.5, minor=True)
    axes.grid(axis="y", which="minor", color="white", linewidth=1)
    axes.tick_params(axis="y", which="both", length=0)
    axes.spines[:].set_visible(False)
    axes.set_ylim(bottom, -1.1)
    axes.set_xlabel("epoch")
    axes.set_title(f"{arm.label}: level of each layer, seed {run.seed}", loc="left", fontsize=11)
    _legend(axes, run, colours, [level for level in used if dense[level]])


def _colours(run: Run, used: list[float]) -> dict[float, Any]:
    """Weak and strong in two colours; the levels of a longer ladder from dark (strong) to light."""
    weak, strong = pair_of(run.config) or (used[-1], used[0])
    if {weak, strong} >= set(used):
        return {weak: WEAK, strong: STRONG}
    return {level: mpl.colormaps["cividis"](i / max(len(used) - 1, 1)) for i, level in enumerate(used)}


def _legend(axes: Axes, run: Run, colours: dict[float, Any], dense: list[float]) -> None:
    knob = knob_of(run.config["compressor"])
    names = {min(colours): " (strong)", max(colours): " (weak)"} if len(colours) > 1 else {}
    handles: list[Any] = [
        Patch(color=colour, label=show_level(knob, level) + names.get(level, "")) for level, colour in colours.items()
    ]
    if dense:
        handles.append(Patch(color=DENSE, label=f"dense: {show_level(knob, *reversed(dense))} saves too little"))
    if lr_drops(run):
        handles.append(Line2D([], [], color="black", linestyle="--", linewidth=1.2, label="learning rate drops"))
    handles.append(Line2D([], [], color="black", linestyle="", marker="v", markersize=4, label="decision"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=3, fontsize=9)
