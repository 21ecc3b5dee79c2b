"""Figures: accuracy against bytes (or time), level maps, and both side by side."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from accordion_bench.progress import human_bytes
from accordion_bench.report.arms import Arm, half_width
from accordion_bench.report.labels import pair_of
from accordion_bench.report.levels import level_map, levels_by_layer
from accordion_bench.report.words import heading, link

# Okabe and Ito: tells apart under every common colour blindness
COLOURS = ["#0072B2", "#E69F00", "#CC79A7", "#009E73", "#56B4E9", "#D55E00"]
MARKERS = "osD^vPX"
NAMES = ("accuracy_bytes", "accuracy_time", "levels", "comparison", "tradeoff")
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "pdf.fonttype": 42,
}


WORST = 20  # points below the best arm: where worse ones are drawn, with their number
MANY = 10  # arms, beyond which their curves hide each other


def draw_all(arms: Sequence[Arm], out: Path, suffix: str = "") -> list[Path]:
    """Write every figure that the arms of one setting allow, as PNG and PDF; returns the PNG files.

    Args:
        arms: of one setting.
        out: folder.
        suffix: of the file names.
    """
    adaptive = [arm for arm in arms if pair_of(arm.runs[0].config) and levels_by_layer(arm.runs[0])]
    with plt.rc_context(STYLE):
        if len(arms) > MANY:
            figures = {"comparison": forest(arms)} | modelled(arms)
            return [save(figure, out / f"{name}{suffix}") for name, figure in figures.items()]
        figures = {"accuracy_bytes": side_by_side(arms, [], "payload_bytes")}
        if all(arm.values("comm_seconds") for arm in arms):
            figures["accuracy_time"] = side_by_side(arms, [], "seconds")
        if adaptive:
            figures["levels"] = level_maps(adaptive)
        figures["comparison"] = side_by_side(arms, adaptive[:1], "payload_bytes")
        figures |= modelled(arms)
        return [save(figure, out / f"{name}{suffix}") for name, figure in figures.items()]


def save(figure: Figure, stem: Path) -> Path:
    """Write PNG and PDF; returns the PNG."""
    pdf, png = (stem.with_name(stem.name + ending) for ending in (".pdf", ".png"))
    figure.savefig(pdf, bbox_inches="tight", metadata={"CreationDate": None})
    figure.savefig(png, bbox_inches="tight", dpi=160)
    plt.close(figure)
    return png


def side_by_side(arms: Sequence[Arm], adaptive: Sequence[Arm], x: str) -> Figure:
    """Accuracy against bytes or time on the left; beside it the level maps of `adaptive`."""
    layers = max((len(levels_by_layer(arm.runs[0])) for arm in adaptive), default=0)
    size = (7 + 6.6 * len(adaptive), min(max(5, 0.2 * layers + 1.8), 10))
    figure, panels = plt.subplots(1, 1 + len(adaptive), figsize=size, squeeze=False, layout="constrained")
    curves(panels[0, 0], arms, x)
    for axes, arm in zip(panels[0, 1:], adaptive, strict=True):
        level_map(axes, arm)
    figure.suptitle(heading(arms[0]), fontsize=12)
    figure.text(0.01, -0.01, footnote(arms), va="top", fontsize=8, color="#444444")
    return figure


def forest(arms: Sequence[Arm]) -> Figure:
    """Many arms: one row each, fewest bytes at the top: accuracy after the last epoch with its 95 % t-interval."""
    rows = sorted(arms, key=lambda arm: arm.mean("payload_bytes") or 0)
    figure, axes = plt.subplots(figsize=(8, 0.3 * len(rows) + 1.6), layout="constrained")
    for y, arm in enumerate(rows):
        ends = [100 * run.rows[-1][arm.metric] for run in arm.runs]
        error = half_width(ends) if arm.n > 1 else None
        colour, mean = "black" if arm.dense else COLOURS[0], float(np.mean(ends))
        axes.errorbar(mean, y, xerr=error, fmt="o", color=colour, capsize=3, markersize=6, zorder=3)
        if arm.dense:
            axes.axvline(mean, color="black", linewidth=0.8, zorder=1)
            axes.axvspan(mean - (error or 0), mean + (error or 0), color="black", alpha=0.07, linewidth=0, zorder=0)
    names = [f"{arm.label}   {human_bytes(arm.mean('payload_bytes') or 0):>8}" for arm in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.set_xlabel(f"test {arms[0].metric} [%]")
    axes.set_title(f"{heading(arms[0])}; payload per worker beside the name", loc="left", fontsize=11)
    told = f"n = {arms[0].n}; after the last epoch; bars: Student's 95 % t-interval; line and band: dense."
    figure.text(0.01, -0.01, told, va="top", fontsize=8, color="#444444")
    return figure


def modelled(arms: Sequence[Arm]) -> dict[str, Figure]:
    """The figure of modelled time, where all arms have it."""
    known = all(arm.values("modelled_seconds") for arm in arms) and any(arm.mean("wire_bytes") for arm in arms)
    return {"tradeoff": tradeoff(arms)} if known else {}


def tradeoff(arms: Sequence[Arm]) -> Figure:
    """Accuracy after the last epoch against bytes on the wire, and against modelled time: one marker per arm.

    Arms that send nothing, like the one-worker control, have no place on either axis.
    """
    arms = [arm for arm in arms if arm.mean("wire_bytes")]
    size = (10, 4.2 + 0.24 * math.ceil(len(arms) / 3))
    figure, panels = plt.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    ys = [[100 * run.rows[-1][arm.metric] for run in arm.runs] for arm in arms]
    means = [float(np.mean(y)) for y in ys]
    floor = max(means) - WORST
    links = "; ".join(sorted({link(arm.config["network"]) for arm in arms}))
    label = {"wire_bytes": "sent by each worker's link (log scale)", "modelled_seconds": f"modelled [s]: {links}"}
    for axes, (x, text) in zip(panels, label.items(), strict=True):
        colours = iter(COLOURS * len(arms))
        for i, arm in enumerate(arms):
            colour = "black" if arm.dense else next(colours)
            at, error = arm.mean(x), half_width(ys[i]) if arm.n > 1 else None
            y, noise = max(means[i], floor), half_width(arm.values(x)) if arm.n > 1 else None
            if y > means[i]:
                axes.annotate(
                    f"↓ {means[i]:.0f} %", (at, y), (7, 0), textcoords="offset points", va="center", fontsize=9
                )
                error = None
            axes.errorbar(at, y, error, noise, color=colour, capsize=2, linewidth=0.8, alpha=0.6, zorder=2)
            style = {"color": colour, "markeredgecolor": "white", "label": arm.label}
            axes.plot(at, y, MARKERS[i % len(MARKERS)], markersize=9, zorder=3, **style)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_xlabel(text)
    bytes_axis(panels[0], (1, 2, 5))
    bottom, top = panels[0].get_ylim()
    panels[0].set_ylim(max(bottom, floor - 1), min(top, 100.5))
    panels[1].set_xlim(left=0)
    panels[0].set_ylabel(f"test {arms[0].metric} [%]")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=9)
    figure.suptitle(heading(arms[0]), fontsize=12)
    bars = "; bars: Student's 95 % t-interval" if max(arm.n for arm in arms) > 1 else ""
    counts = "/".join(map(str, sorted({arm.n for arm in arms})))
    low = "; ↓: further down, at this number" if min(means) < floor else ""
    panels[0].set_title(f"n = {counts}; after the last epoch{bars}{low}", loc="left", fontsize=9, color="#444444")
    return figure


def level_maps(adaptive: Sequence[Arm]) -> Figure:
    """One level map below the other, each of the arm's first seed."""
    heights = [0.22 * len(levels_by_layer(arm.runs[0])) + 1.8 for arm in adaptive]
    figure, panels = plt.subplots(
        len(adaptive), 1, figsize=(8, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for axes, arm in zip(panels[:, 0], adaptive, strict=True):
        level_map(axes, arm)
    return figure


def curves(axes: Axes, arms: Sequence[Arm], x: str) -> None:
    """One curve per arm: mean over the seeds epoch by epoch, band = their range, marker = end with 95 % t-interval.

    Args:
        axes: to draw on.
        arms: of one setting.
        x: `payload_bytes` (log scale) or `seconds`.
    """
    colours = iter(COLOURS * len(arms))
    floors = []
    for i, arm in enumerate(arms):
        colour = "black" if arm.dense else next(colours)
        epochs = range(min(len(run.rows) for run in arm.runs))
        xs = np.array([np.mean([run.rows[e][x] for run in arm.runs]) for e in epochs])
        ys = 100 * np.array([[run.rows[e][arm.metric] for run in arm.runs] for e in epochs])
        mean, end = ys.mean(axis=1), (xs[-1], ys[-1].mean())
        axes.plot(xs, mean, color=colour, linewidth=1.5, zorder=2)
        if arm.n > 1:
            axes.fill_between(xs, ys.min(axis=1), ys.max(axis=1), color=colour, alpha=0.15, linewidth=0, zorder=1)
            axes.errorbar(*end, half_width(list(ys[-1])), color=colour, capsize=3, zorder=3)
        text, marker = f"{arm.label}: {end[1]:.1f} %", MARKERS[i % len(MARKERS)]
        axes.plot(*end, marker, color=colour, markersize=8, markeredgecolor="white", zorder=4, label=text)
        floors.append(np.quantile(mean, 0.25))
    axes.set_ylim(max(0, min(floors) - 5), 100.5)
    axes.set_ylabel(f"test {arms[0].metric} [%]")
    axes.grid(alpha=0.25, linewidth=0.6)
    widest = max(len(arm.label) for arm in arms)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=1 if widest > 40 else 2, fontsize=9)
    if x == "seconds":
        axes.set_xlabel("training time [s]")
        axes.set_title(f"{arms[0].metric.capitalize()} against time", loc="left", fontsize=11)
        return
    bytes_axis(axes)
    axes.set_xlabel("payload sent by each worker so far (log scale)")
    axes.set_title(f"{arms[0].metric.capitalize()} against communication", loc="left", fontsize=11)


def bytes_axis(axes: Axes, steps: Sequence[float] = (1,)) -> None:
    """A logarithmic axis of bytes, with a number at each of these parts of a decade."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, steps))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: human_bytes(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def footnote(arms: Sequence[Arm]) -> str:
    """Seeds, and what lines, bands and markers are."""
    seeds = sorted({seed for arm in arms for seed in arm.seeds if seed is not None})
    several = max(arm.n for arm in arms) > 1
    several_lines = "lines: mean over the seeds; bands: their range; bars: Student's 95 % t-interval"
    lines = several_lines if several else "no intervals"
    counts = "/".join(map(str, sorted({arm.n for arm in arms})))
    shown = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    return f"n = {counts} ({shown}); {lines}; markers: after the last epoch; the first, lowest epochs are cut off."
