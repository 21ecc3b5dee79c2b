"""Where the time of a step goes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from accordion_bench.report.arms import Arm
from accordion_bench.report.figures.forest import name, named_width
from accordion_bench.report.figures.series import seeds
from accordion_bench.report.figures.style import Sheet
from accordion_bench.report.words import heading

# Tol's light colours (2021) and a purple: these are no methods; neighbours are apart under colour blindness
PARTS = {
    "data": "#DDDDDD",
    "compute": "#77AADD",
    "encode": "#EEDD88",
    "communication": "#EE8866",
    "decode": "#AA4499",
    "exchange": "#EE8866",
    "update": "#44BB99",
    "policy": "#444444",
}
HATCHES = {"exchange": "////"}


def breakdown(arms: Sequence[Arm]) -> Figure | None:
    """Milliseconds of a step as stacked bars: its parts, the exchange split where communication was measured."""
    rows = [(arm, parts(arm)) for arm in arms]
    if not any(sum(own.values()) for _, own in rows) or not all(
        "compute_seconds" in arm.runs[0].rows[-1] for arm in arms
    ):
        return None
    names = [name(arm) for arm in arms]
    rows_of_text = sum(text.count("\n") + 1 for text in names)
    sheet = Sheet(1, height=max(0.19 * rows_of_text + 0.1, 0.6), width=named_width(names))
    (axes,) = sheet.panels
    start = np.zeros(len(rows))
    used = [part for part in PARTS if any(own[part] for _, own in rows)]
    for part in used:
        lengths = np.array([1000 * own[part] for _, own in rows])
        style: dict[str, Any] = {
            "color": PARTS[part],
            "edgecolor": "white",
            "linewidth": 0.5,
            "hatch": HATCHES.get(part),
        }
        axes.barh(range(len(rows)), lengths, left=start, height=0.72, **style)
        start += lengths
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_ylabel("method")
    axes.set_xlabel("time of a step [ms]")
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    handles = [Patch(facecolor=PARTS[p], edgecolor="white", hatch=HATCHES.get(p), label=p) for p in used]
    whole = {arm.label for arm in arms if not arm.values("comm_seconds")}
    shared = "; exchange: workers share a process, so that codec and communication cannot be told apart, and all "
    told = shared + "workers of the process are in a step" if whole else ""
    return sheet.finish(
        heading(arms[0]), f"{seeds(arms)}; mean over the steps after step 1, and over the seeds{told}.", handles
    )


def parts(arm: Arm) -> dict[str, float]:
    """Seconds of a step by part, mean over the seeds; the first step is on no clock."""
    found = dict.fromkeys(PARTS, 0.0)
    for run in arm.runs:
        row = run.rows[-1]
        steps = max((row.get("step") or 0) - 1, 1) * arm.n
        for part in ("data", "compute", "update", "policy"):
            found[part] += row.get(f"{part}_seconds", 0.0) / steps
        if row.get("comm_seconds") is None:
            found["exchange"] += row.get("exposed_seconds", 0.0) / steps
        else:
            for part, key in (("encode", "encode"), ("communication", "comm"), ("decode", "decode")):
                found[part] += row.get(f"{key}_seconds", 0.0) / steps
    return found
