"""Where the time of a step goes."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.timed import communicates, is_ddp
from accordion_bench.report.read.load import Run
from accordion_bench.report.render.captions import heading
from accordion_bench.report.render.figures.forest import name, named_width
from accordion_bench.report.render.figures.norms import critical_share
from accordion_bench.report.render.figures.series import seeds
from accordion_bench.report.render.figures.style import Sheet

# Tol's light colours (2021) and a purple: these are no methods; neighbours are apart under colour blindness
PARTS = {
    "data": "#DDDDDD",
    "compute": "#77AADD",
    "compute and exchange": "#77AADD",
    "exchange not hidden": "#EE8866",
    "update": "#44BB99",
    "policy": "#444444",
    "encode": "#EEDD88",
    "communication": "#EE8866",
    "decode": "#AA4499",
}
HATCHES = {"exchange not hidden": "////", "compute and exchange": "////"}
BESIDE = ("encode", "communication", "decode")  # while the other parts go on
COLUMNS = {"exchange not hidden": "exposed", "communication": "comm"}  # of other names


class Bar(NamedTuple):
    """One row: seconds of a step by part."""

    name: str
    parts: dict[str, float]


def breakdown(arms: Sequence[Arm]) -> Figure | None:
    """Milliseconds of a step as stacked bars; below them, thin, what the exchange did at the same time.

    Arms whose policy distinguishes critical regimes have a bar for each regime, too; loops of somebody's own whose rows
    do not tell their times have none.
    """
    arms = [arm for arm in arms if not arm.attached or arm.runs[0].rows[-1].get("compute_seconds") is not None]
    rows = [bar for arm in arms for bar in bars(arm)]
    if not any(sum(own.values()) for _, own in rows) or not all(
        "compute_seconds" in arm.runs[0].rows[-1] for arm in arms
    ):
        return None
    names = [text for text, _ in rows]
    beside = any(own[part] for _, own in rows for part in BESIDE)
    rows_of_text = sum(text.count("\n") + 1 for text in names)
    sheet = Sheet(1, height=max((0.24 if beside else 0.19) * rows_of_text + 0.1, 0.6), width=named_width(names))
    (axes,) = sheet.panels
    used = [part for part in PARTS if any(own[part] for _, own in rows)]
    places = np.arange(len(rows))
    in_step = [part for part in used if part not in BESIDE]
    if beside:  # room for a thin bar below each
        _stack(axes, rows, in_step, places - 0.13, 0.5)
        _stack(axes, rows, [part for part in used if part in BESIDE], places + 0.27, 0.2)
    else:
        _stack(axes, rows, in_step, places, 0.72)
    axes.set_yticks(places, names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel("method")
    axes.set_xlabel("time of a step [ms]")
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    handles = [Patch(facecolor=PARTS[p], edgecolor="white", hatch=HATCHES.get(p), label=p) for p in used]
    return sheet.finish(heading(arms[0]), f"{seeds(arms)}; {_told(arms, rows, beside)}.", handles)


def _stack(axes: Axes, rows: Sequence[Bar], parts: Sequence[str], places: Any, height: float) -> None:
    start = np.zeros(len(rows))
    for part in parts:
        lengths = np.array([1000 * own[part] for _, own in rows])
        style: dict[str, Any] = {"color": PARTS[part], "edgecolor": "white", "linewidth": 0.5}
        axes.barh(places, lengths, left=start, height=height, hatch=HATCHES.get(part), **style)
        start += lengths


def _told(arms: Sequence[Arm], rows: Sequence[Bar], beside: bool) -> str:
    told = "mean over the steps after step 1, and over the seeds"
    if beside:
        told += "; thin: what the exchange has done, hidden by the backward pass or not"
    if any(not arm.attached and not communicates(arm) for arm in arms):
        told += "; workers share a process: all of them are in a step, and no communication"
    if any(is_ddp(arm.config) for arm in arms):
        told += "; DDP waits inside the backward pass, so that its exchange cannot be told from computation"
    if len(rows) > len(arms):
        told += "; critical: a policy took most layers as critical"
    return told


def bars(arm: Arm) -> list[Bar]:
    """The arm as a whole; then each regime, where its policy distinguishes two and both have occurred."""
    found = [Bar(name(arm), parts(arm))]
    shares = [critical_share(run) for run in arm.runs]
    critical = [None if share is None else {e for e, part in enumerate(share) if part > 0.5} for share in shares]
    for text, inside in (("critical epochs", True), ("other epochs", False)):
        chosen = [
            (run, [e for e in range(len(run.rows)) if (e in epochs) == inside])
            for run, epochs in zip(arm.runs, critical, strict=True)
            if epochs is not None and 0 < len(epochs) < len(run.rows)
        ]
        if chosen:
            found.append(Bar(f"… {text}", _mean([split(run, epochs) for run, epochs in chosen])))
    return found


def parts(arm: Arm) -> dict[str, float]:
    """Seconds of a step by part, mean over the seeds; the first step is on no clock."""
    return _mean([split(run, range(len(run.rows))) for run in arm.runs])


def split(run: Run, epochs: Collection[int]) -> dict[str, float]:
    """Seconds of a step by part, in some epochs of a run."""
    found, steps = dict.fromkeys(PARTS, 0.0), 0
    ddp, measured = is_ddp(run.config), run.rows[-1].get("comm_seconds") is not None
    for epoch in epochs:
        row, before = run.rows[epoch], run.rows[epoch - 1] if epoch else {}
        steps += (row.get("step") or 0) - (before.get("step") or 1)
        for part in PARTS:
            key = f"{COLUMNS.get(part, part)}_seconds"
            if part not in BESIDE or measured:
                found[part] += (row.get(key) or 0.0) - (before.get(key) or 0.0)
    if ddp:
        found["compute and exchange"], found["compute"] = found["compute"], 0.0
    return {part: spent / max(steps, 1) for part, spent in found.items()}


def _mean(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {part: float(np.mean([own[part] for own in found])) for part in PARTS}
