"""Gradients over training: the norms of layers, the critical regimes in them, and the error of compression."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from accordion_bench.methods.labels import detects, drives, pair_of, policies_of
from accordion_bench.options.units import counted
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.read.load import Run
from accordion_bench.report.render.captions import heading
from accordion_bench.report.render.figures.curves import panes
from accordion_bench.report.render.figures.level_grids import MAPS, shown
from accordion_bench.report.render.figures.scales import EPOCHS, column, entry, log_axis, name_epochs, seeds, several
from accordion_bench.report.render.figures.sheet import Sheet
from accordion_bench.report.render.looks import looks

SHADE = "#E69F00"
NOISE = 1e-3  # of the median layer's norm: what stays below it is rounding
NAMED = 8  # layers up to which each one stands in the legend


def norms(arms: Sequence[Arm]) -> Figure | None:
    """One panel per arm that has norms: the norm of each layer's gradients, summed over an epoch, epoch by epoch."""
    known = [arm for arm in arms if len(norms_by_layer(arm.runs[0])[0]) > 1]
    adaptive = [arm for arm in known if policies_of(arm.config)]
    drawn = adaptive + [arm for arm in known if arm.dense] if adaptive else known
    if not drawn:
        return None
    panels = drawn[:MAPS]
    sheet = Sheet(len(panels))
    seen, noise = told_apart([norms_by_layer(arm.runs[0])[1] for arm in panels])
    shares = [critical_share(arm.runs[0]) for arm in panels]
    drawn_norms = []
    for axes, arm, share in zip(sheet.panels, panels, shares, strict=True):
        drawn_norms.append(_panel(axes, arm, share, seen))
        sheet.titles[axes] = arm.label
    if len(values := np.concatenate(drawn_norms)):
        low, high = values.min() / 1.3, values.max() * 1.3
        for axes in sheet.panels:
            log_axis(axes, low, high)
            axes.set_ylim(low, high)
    left_out = f" Left out, because they are rounding errors and no gradients: {_noise(noise)}." if noise else ""
    more = f" {len(drawn) - MAPS} more arms have norms, too." if len(drawn) > MAPS else ""
    return sheet.finish(
        f"{heading(arms[0])}; one seed of each arm. Norm of worker 0's gradients, or what the policy looks at, summed "
        f"over an epoch. Shaded: critical regimes, the darker the more layers are in one.{left_out}{more}",
        _handles(seen, any(share is not None for share in shares)),
    )


def told_apart(norms: Sequence[Mapping[str, Sequence[float]]]) -> tuple[list[str], list[str]]:
    """(layers that have a gradient, layers whose norms are rounding errors in every arm), in the network's order.

    A bias before a BatchNorm changes no loss: its gradient is 0, of which rounding leaves a millionth of the others'.

    Args:
        norms: of each arm, by layer and epoch.
    """
    layers = list(dict.fromkeys(layer for own in norms for layer in own))
    every = [(layer, _largest(values)) for own in norms for layer, values in own.items()]
    least = NOISE * float(np.median([largest for _, largest in every if largest > 0] or [0.0]))
    seen = {layer for layer, largest in every if largest > least}
    return [layer for layer in layers if layer in seen], [layer for layer in layers if layer not in seen]


def _largest(values: Sequence[float]) -> float:
    return max((value for value in values if np.isfinite(value)), default=0.0)


def _noise(layers: Sequence[str]) -> str:
    """`16 layers such as features.0.bias, below a thousandth of the median`."""
    return f"{counted(len(layers), 'layer')} such as {shown(layers[0])}, below a thousandth of the median layer's"


def norms_by_layer(run: Run) -> tuple[list[int], dict[str, list[float]]]:
    """(epochs, the norm of each layer in them): measured in every epoch, or else noted by a policy at its checks."""
    rows = [(row["epoch"], row["norms"]) for row in run.rows if row.get("norms")]
    if not rows:
        found = [(row["epoch"], _noted(row)) for row in run.rows]
        rows = [(epoch, noted) for epoch, noted in found if noted]
    layers = rows[0][1] if rows else {}
    return [epoch for epoch, _ in rows], {layer: [own.get(layer, np.nan) for _, own in rows] for layer in layers}


def _noted(row: Mapping[str, Any]) -> dict[str, float]:
    """Norms in the decision of a row; of the whole model where a policy looks at no single layers."""
    for decision in (row.get("decisions") or {}).values():
        if isinstance(decision, dict) and decision.get("norm"):
            norm = decision["norm"]
            return dict(zip(decision.get("names") or ["whole model"], norm, strict=False))
    return {}


def critical_share(run: Run) -> list[float] | None:
    """Of each epoch, the share of layers that were taken as critical; None where no policy distinguishes."""
    pair, periods = pair_of(run.config), pair_of(run.config, "period")
    plans = [row.get("plan") or {} for row in run.rows]
    if pair and all(plan.get("levels") for plan in plans):
        return [sum(level == pair[0] for level in plan["levels"].values()) / len(plan["levels"]) for plan in plans]
    for node in policies_of(run.config).values():
        if spans := node.get("critical"):  # levels by the calendar
            return [float(any(first <= epoch < end for first, end in spans)) for epoch in range(len(plans))]
    if periods:
        return [float(plan.get("period") == periods[0]) for plan in plans]
    if any(detects(node) and drives(node) == "batch" for node in policies_of(run.config).values()):
        return [float(plan.get("batch_size") == run.config["batch_size"]) for plan in plans]
    return None


def _panel(axes: Axes, arm: Arm, share: Sequence[float] | None, layers: Sequence[str]) -> np.ndarray:
    """Draw one arm; its norms, those that a logarithm has."""
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
            line = {"color": _colour(i, len(layers)), "linewidth": 0.8, "marker": marker, "markersize": 3}
            axes.plot(np.array(epochs) + 1, by_layer[layer], **line)
    name_epochs(axes, len(arm.runs[0].rows))
    axes.set_ylabel("gradient norm [-, log scale]")
    values = np.array([norm for layer in layers for norm in by_layer.get(layer, ())], dtype=float)
    return values[np.isfinite(values) & (values > 0)]


def _colour(layer: int, layers: int) -> Any:
    return mpl.colormaps["viridis"](layer / max(layers - 1, 1) * 0.9)


def _handles(layers: Sequence[str], shaded: bool) -> list[Any]:
    """All layers, or the first, the middle and the last one."""
    picked = range(len(layers)) if len(layers) <= NAMED else (0, len(layers) // 2, len(layers) - 1)
    places = {0: " (first)", len(layers) - 1: " (last)"} if len(layers) > NAMED else {}
    found: list[Any] = [
        Line2D([], [], color=_colour(i, len(layers)), label=shown(layers[i]) + places.get(i, "")) for i in picked
    ]
    if shaded:
        found.append(Patch(facecolor=SHADE, alpha=0.4, label="critical"))
    return found


def variance(arms: Sequence[Arm]) -> Figure | None:
    """||x - sent||^2 / ||x||^2 in one exchange of each epoch: an unbiased quantiser's normalised variance."""
    errors = {arm.label: column(arm, "compression_error") for arm in arms}
    lossy = [pair for pair in zip(arms, looks(arms), strict=True) if (np.nan_to_num(errors[pair[0].label]) > 0).any()]
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
            axes.plot(epochs, own.mean(axis=0), color=look.colour, linestyle=look.line, zorder=2, gid="curve")
            if arm.n > 1:
                low, high = own.min(axis=0), own.max(axis=0)
                axes.fill_between(epochs, low, high, color=look.colour, alpha=0.13, linewidth=0, zorder=1)
            axes.plot(epochs[-1:], own.mean(axis=0)[-1:], zorder=3, **look.point)
        log_axis(axes, everything.min(), everything.max())
        axes.set_ylim(everything.min() / 1.3, everything.max() * 1.3)
        axes.set_xlabel(EPOCHS)
        axes.set_ylabel("|x - sent|² / |x|² [-, log scale]")
        axes.grid()
    bands = "; lines: mean over the seeds; bands: their range" if several(arms) else ""
    note = (
        f"{heading(arms[0])}; {seeds(arms)}{bands}; worker 0, one exchange of each epoch; of unbiased quantisers this "
        "is the normalised variance."
    )
    return sheet.finish(note, [entry(look, arm.label) for arm, look in lossy])
