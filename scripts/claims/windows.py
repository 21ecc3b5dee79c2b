"""Test whether a policy finds the epochs that matter: the cost of strong compression in each window alone, beside the
policy's decisions.

Under `windows` a plan's table names the policy, the arm that is weak all the time, and the arms that are strong in one
window of epochs:

    windows: {of: accordion, whole: weak, at: {strong_0_3: [0, 3], strong_3_6: [3, 6]}}
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from accordion_bench.methods.labels import policies_of
from accordion_bench.report.compare.intervals import Difference, difference
from accordion_bench.report.read import Run
from accordion_bench.report.render.figures.layers import critical_share, norms_by_layer
from accordion_bench.report.render.tables import aligned
from accordion_bench.runs.metrics import Metric, metric
from scripts.claims.outcome import Outcome, runs_by_arm
from scripts.claims.plan import Table
from scripts.claims.summary import gap_shown

COLOUR = "#0072B2"


@dataclass(frozen=True)
class Window:
    """Epochs first to end - 1 at the strong level, all others at the weak one.

    Args:
        first, end: range of epochs.
        called_critical: share of the policy's layers and epochs in the window that it held at the weak level.
        change: median over layers and epochs of the window of the norm's relative change from the epoch before.
        cost: metric minus that of the arm that is weak all the time, paired by seed; None = no seed has both.
        seeds: how many have both.
    """

    first: int
    end: int
    called_critical: float
    change: float
    cost: Difference | None
    seeds: int


def write_windows(table: Table, outcomes: Sequence[Outcome], out: Path) -> None:
    """Write windows.md and windows.png of a table that has windows; nothing if its policy has not run.

    Args:
        table: table of the plan.
        outcomes: runs of the table.
        out: folder of the table.
    """
    if table.windows is None:
        return
    done = runs_by_arm(outcomes)
    policy = list(done.get(table.windows["of"], {}).values())
    if not policy:
        return
    found = windows(table.windows, done)
    judged = metric(policy[0].summary["metric_name"])
    (out / "windows.md").write_text(aligned(cells(found, judged)) + "\n", encoding="utf-8")
    draw(found, policy, judged, out / "windows.png")


def windows(told: Mapping[str, Any], done: Mapping[str, Mapping[int, Run]]) -> list[Window]:
    """Return the windows of a table in the order of their epochs.

    Args:
        told: entry of the plan under `windows`.
        done: arm -> seed -> run.
    """
    policy = list(done[told["of"]].values())
    share, change = shares(policy), changes(policy)
    whole = done.get(told["whole"], {})
    found = []
    for arm, (first, end) in sorted(told["at"].items(), key=lambda item: item[1]):
        seen = float(np.median(change[:, :, max(first - 1, 0) : end - 1]))
        seeds = sorted(set(done.get(arm, {})) & set(whole))
        cost = _cost(done[arm], whole, seeds) if seeds else None
        found.append(Window(first, end, float(share[:, first:end].mean()), seen, cost, len(seeds)))
    return found


def shares(runs: Sequence[Run]) -> np.ndarray:
    """Return the share of layers at the weak level [runs, epochs]."""
    return np.array([critical_share(run) for run in runs])


def changes(runs: Sequence[Run]) -> np.ndarray:
    """|n(e) - n(e-1)| / n(e-1) of each layer that has a level, from the second epoch on [runs, layers, epochs - 1]."""
    found = []
    for run in runs:
        levels = run.rows[0]["plan"]["levels"]
        norms = np.array([own for layer, own in norms_by_layer(run)[1].items() if layer in levels])
        found.append(np.abs(np.diff(norms)) / norms[:, :-1])
    return np.array(found)


def _cost(own: Mapping[int, Run], whole: Mapping[int, Run], seeds: Sequence[int]) -> Difference:
    values = ([float(runs[seed].summary["metric"]) for seed in seeds] for runs in (own, whole))
    return difference(*values, (tuple(seeds), tuple(seeds)))


def cells(found: Sequence[Window], judged: Metric) -> list[list[str]]:
    """Return the windows as text."""
    rows = [["strong in epochs", "called critical by the policy", "change of the norm, median", "minus weak", "n"]]
    for window in found:
        gap = window.cost
        cost = "–" if gap is None else gap_shown(judged, gap.gap, gap.half, gap.shown)
        name = f"{window.first} to {window.end - 1}"
        rows.append([name, f"{100 * window.called_critical:.0f} %", f"{window.change:.2f}", cost, f"{window.seeds}"])
    return rows


def draw(found: Sequence[Window], policy: Sequence[Run], judged: Metric, file: Path) -> None:
    """Draw four panels above each other: learning rate, change of the norm, decisions, and each window's cost."""
    heights = (1, 1.5, 1, 1.7)
    figure, panels = plt.subplots(4, 1, figsize=(5.6, 7.2), sharex=True, height_ratios=heights, layout="constrained")
    epochs = len(policy[0].rows)
    edges = np.arange(epochs + 1)
    panels[0].stairs([row["lr"] for row in policy[0].rows], edges, color=COLOUR, baseline=None)
    panels[0].set_ylabel("learning rate")
    _draw_changes(panels[1], policy)
    panels[2].stairs(100 * shares(policy).mean(axis=0), edges, color=COLOUR, fill=True, alpha=0.4)
    panels[2].set_ylim(0, 100)
    panels[2].set_ylabel("layers called\ncritical [%]")
    for window in found:
        if window.cost is None:
            continue
        half = 0.0 if math.isnan(window.cost.half) else judged.scaled(window.cost.half)
        middle, wide = (window.first + window.end) / 2, (window.end - window.first) / 2
        cost = judged.scaled(window.cost.gap)
        panels[3].errorbar(middle, cost, half, wide, color=COLOUR, fmt="o", markersize=4, capsize=3)
    panels[3].axhline(0, color="0.4", linewidth=0.8)
    unit = "points" if judged.percent else judged.words
    panels[3].set_ylabel(f"strong in this window\nalone, minus weak\n[{unit}]")
    panels[3].set_xlabel("training [epochs]")
    panels[3].set_xlim(0, epochs)
    for panel in panels:
        panel.set_xticks(edges)
        panel.grid(alpha=0.25)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _draw_changes(panel: Axes, policy: Sequence[Run]) -> None:
    """Draw the median and the middle 80 % of layers and seeds at the ends of epochs, and the detector's threshold."""
    low, middle, high = np.percentile(changes(policy), (10, 50, 90), axis=(0, 1))
    ends = np.arange(2, len(middle) + 2)
    panel.fill_between(ends, low, high, color=COLOUR, alpha=0.2, linewidth=0)
    panel.plot(ends, middle, color=COLOUR, marker="o", markersize=4)
    for node in policies_of(policy[0].config).values():
        panel.axhline(node["eta"], color="0.4", linestyle="--", linewidth=0.8, label="critical from here on")
    panel.legend(frameon=False, fontsize=8, loc="center right")
    panel.set_ylim(bottom=0)
    panel.set_ylabel("relative change of\na layer's norm")
