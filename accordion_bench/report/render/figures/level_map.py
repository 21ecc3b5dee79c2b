"""The level map: which layer used which level in which epoch, and which layers travel dense at a level."""

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import offset_copy

from accordion_bench.methods.labels import knob_of, pair_of, show_level
from accordion_bench.options.instantiate import build
from accordion_bench.options.trusted import is_trusted
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.read.load import Run
from accordion_bench.report.read.printable import printable

LADDER, DENSE = "viridis", "#DDDDDD"  # levels from dark (strong) to light (weak): no method has these colours
LABELLED = 24  # layers at most that have their names beside them
LETTERS = 80  # of a layer's name
LARGEST, MOST = 10_000_000, 100  # of the numbers and lists of options with which something is built: nobody waits here
DEEPEST = 10_000  # of the numbers of a model, which count its layers
LR_DROP = 0.5  # a learning rate of at most this times the last one is a drop


def levels_by_layer(run: Run) -> dict[str, list[float | None]]:
    """Per layer, in the network's order, the level of each epoch; {} where no policy drives levels."""
    plans = [(row.get("plan") or {}).get("levels") or {} for row in run.rows]
    if not run.config.get("adaptive") or not any(plans):
        return {}
    return {layer: [plan.get(layer) for plan in plans] for layer in plans[0]}


def lr_drops(run: Run) -> list[int]:
    """Epochs that start with a learning rate that has dropped at once; a steady decay, however steep, has no drop.

    None where a row does not tell its learning rate.
    """
    if any(row.get("lr") is None for row in run.rows):
        return []
    rates = [row["lr"] for row in run.rows]
    halved = [epoch for epoch in range(1, len(rates)) if rates[epoch] <= LR_DROP * rates[epoch - 1]]
    factor = _schedule(run) if halved else None
    if factor is None:
        return halved
    ends = {epoch: factor(math.nextafter(epoch, 0)) / factor(epoch - 1) for epoch in halved}
    return [epoch for epoch in halved if rates[epoch] <= LR_DROP * rates[epoch - 1] * ends[epoch]]


def _schedule(run: Run) -> Callable[[float], float] | None:
    """The factor of a run's learning rate; None where it is none of ours, or this version cannot rebuild it."""
    if not _may_build(run.config, "schedule"):
        return None
    try:
        rebuilt = {"epochs": run.config["epochs"], "workers": run.config["workers"] or 1}
        return build(run.config["schedule"], "schedule", **rebuilt)
    except Exception:
        return None


def dense_layers(config: dict[str, Any], level: float) -> frozenset[str]:
    """Parameters that travel dense at a level; none where the run's model is none of ours, or cannot be rebuilt."""
    from accordion_bench.compressors.assemble import wrapped_compressor

    if not all(_may_build(config, group) for group in ("compressor", "model", "dataset")):
        return frozenset()
    try:
        compressor = wrapped_compressor(config["compressor"], config["optimizer"]).compressor
        task = {"model": config["model"], "dataset": config["dataset"]}
        shapes = _shapes(json.dumps(task, sort_keys=True))
        return frozenset(spec.name for spec in shapes if not compressor.compresses(spec, level))
    except Exception:  # an older run's options may have no meaning today; the map is then drawn without this detail
        return frozenset()


def _may_build(config: dict[str, Any], group: str) -> bool:
    """Whether the options of a config group name a class of that group, and are of a size that costs nothing."""
    node = config.get(group)
    if not isinstance(node, dict) or not is_trusted(node.get("_target_"), group):
        return False
    most = DEEPEST if group == "model" else LARGEST
    values = [item for value in node.values() for item in (value if isinstance(value, list) else [value])]
    small = all(abs(item) <= most for item in values if isinstance(item, int | float))
    plain = all(isinstance(item, int | float | str | None) for item in values)
    return small and plain and len(values) <= MOST


@functools.cache
def _shapes(task_json: str) -> tuple[Any, ...]:
    """The trained tensors of a model for a data set: runs that differ in their compressor share them.

    Shapes alone: the tensors take no memory, and no values. For random ones without memory torch would import its
    compiler, which takes longer than all else in a report.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    from accordion_bench.config.components import build_model
    from accordion_bench.options.instantiate import build
    from accordion_bench.plan import TensorSpec
    from accordion_bench.tensors.keyed_rng import kept_rng

    class NoValues(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.__name__ == "normal_":  # a tensor's, or that of torch.nn.init
                return args[0] if args else kwargs["tensor"]
            return function(*args, **(kwargs or {}))

    task = json.loads(task_json)
    with kept_rng(), torch.device("meta"), NoValues():
        model = build_model(task["model"], build(task["dataset"], "dataset"))
    return tuple(TensorSpec(name, tuple(parameter.shape)) for name, parameter in model.named_parameters())


def shown(layer: str) -> str:
    """A layer's name where there is little room."""
    return printable(layer.removesuffix(".weight"), LETTERS)


def level_map(axes: Axes, arm: Arm) -> tuple[list[Any], str]:
    """Layers by epochs of an arm's first seed: colours are levels, triangles decisions, lines learning-rate drops.

    Returns:
        the entries of its legend, and its title.
    """
    run = arm.runs[0]
    levels, epochs = levels_by_layer(run), len(run.rows)
    used = sorted({level for row in levels.values() for level in row if level is not None})
    dense = {level: dense_layers(run.config, level) & levels.keys() for level in used}
    colours = _colours(run, used)
    rgba = {level: mpl.colors.to_rgba(colour) for level, colour in colours.items()}
    grey, nothing = mpl.colors.to_rgba(DENSE), (1.0, 1.0, 1.0, 1.0)

    def square(layer: str, level: float | None) -> tuple[float, float, float, float]:
        if level is None:
            return nothing
        return grey if layer in dense[level] else rgba[level]

    grid = [[square(layer, level) for level in row] for layer, row in levels.items()]
    bottom = len(levels) - 0.5
    axes.imshow(np.array(grid), aspect="auto", interpolation="nearest", extent=(0.5, epochs + 0.5, bottom, -0.5))
    axes.vlines([epoch + 0.5 for epoch in lr_drops(run)], -0.5, bottom, color="black", linestyle="--", linewidth=1)
    decided = [row["epoch"] + 1.5 for row in run.rows if row.get("decisions")]
    above = offset_copy(axes.get_xaxis_transform(), axes.get_figure(root=True), y=4, units="points")
    axes.plot(decided, [1] * len(decided), "v", color="black", markersize=2.5, clip_on=False, transform=above)

    step = math.ceil(len(levels) / LABELLED)
    names = [shown(layer) for layer in levels]
    axes.set_yticks(range(0, len(levels), step), names[::step])
    if len(levels) <= LABELLED:
        axes.hlines(np.arange(len(levels) - 1) + 0.5, 0.5, epochs + 0.5, color="white", linewidth=0.5)
    axes.tick_params(axis="y", which="both", length=0)
    axes.spines[:].set_visible(False)
    axes.set_ylim(bottom, -0.5)
    axes.set_xlim(0.5, epochs + 0.5)
    axes.set_xlabel("training [epochs]")
    axes.set_ylabel("layer")
    handles = _handles(run, colours, [level for level in used if dense[level]], bool(decided))
    return handles, arm.label


def _colours(run: Run, used: list[float]) -> dict[float, Any]:
    """The levels from dark (strong) to light (weak); of a pair both, though only one may be used."""
    pair = pair_of(run.config) or []
    ladder = sorted(pair if set(pair) >= set(used) else used)
    return {level: mpl.colormaps[LADDER](0.15 + 0.6 * i / max(len(ladder) - 1, 1)) for i, level in enumerate(ladder)}


def _handles(run: Run, colours: dict[float, Any], dense: list[float], decided: bool) -> list[Any]:
    knob = knob_of(run.config["compressor"])
    names = {min(colours): " (strong)", max(colours): " (weak)"} if len(colours) > 1 else {}
    handles: list[Any] = [
        Patch(color=colour, label=show_level(knob, level) + names.get(level, "")) for level, colour in colours.items()
    ]
    if dense:
        handles.append(Patch(color=DENSE, label=f"dense: {show_level(knob, *reversed(dense))} saves too little"))
    if lr_drops(run):
        handles.append(Line2D([], [], color="black", linestyle="--", linewidth=1, label="learning rate drops"))
    if decided:
        handles.append(Line2D([], [], color="black", linestyle="", marker="v", markersize=3, label="decision"))
    return handles
