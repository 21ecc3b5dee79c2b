"""The level map: which layer used which level in which epoch, and which layers travel dense at a level."""

import math
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import offset_copy

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.render.figures.marks import name_epochs
from accordion_bench.report.render.level_grid import level_grid
from accordion_bench.report.render.rebuilt import lr_drops

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
