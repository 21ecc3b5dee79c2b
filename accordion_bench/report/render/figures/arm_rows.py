"""Figures with one row per arm: final metric, time to a target, and breakdown of a step's time."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from accordion_bench.options.units import digits
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.beside import first_look, mean, race
from accordion_bench.report.compare.intervals import show_bytes
from accordion_bench.report.compare.times import communicates, is_ddp
from accordion_bench.report.read.load import Run
from accordion_bench.report.render import with_looks
from accordion_bench.report.render.captions import heading
from accordion_bench.report.render.figures.curves import points_note
from accordion_bench.report.render.figures.layers import critical_share
from accordion_bench.report.render.figures.sheet import (
    AXIS,
    LETTER,
    SMALL,
    Sheet,
    dense_line,
    end,
    end_limits,
    end_marker,
    interval,
    interval_bar,
    lines,
    metric_label,
    seeds,
    several,
    shown_end,
)

WIDEST = 0.36  # of the paper's width; longer names are wrapped
ROW = 0.17  # inches per line of text
LEAST = 1.2  # least height of all rows in inches, for the label of their axis


def name(arm: Arm) -> str:
    """Return the label of a row, wrapped if it is long."""
    return "\n".join(lines(arm.label, int(WIDEST * mpl.rcParams["figure.figsize"][0] / LETTER)))


def sheet_of_rows(names: Sequence[str], panels: int = 1) -> Sheet:
    """Return a sheet with panels for these rows, side by side, or stacked on narrow paper."""
    rows_of_text = sum(text.count("\n") + 1 for text in names)
    return Sheet(panels, height=max(ROW * rows_of_text, LEAST) + AXIS)


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label the rows, the first one at the top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def forest(arms: Sequence[Arm]) -> Figure:
    """Draw one row per arm, in table order: the metric after the last epoch with its 95 % t-interval."""
    names = [f"{name(arm)}   {show_bytes(arm.mean('wire_bytes')):>8}" for arm in arms]
    sheet = sheet_of_rows(names)
    (axes,) = sheet.panels
    name_rows(axes, names)
    axes.set_xlim(end_limits(arms))
    for y, (arm, look) in enumerate(with_looks(arms)):
        value, half = end(arm)
        interval_bar(axes, (value, y), half, look.colour, across=True)
        end_marker(axes, (value, y), look, shown_end(arm), across=True)
        if arm.dense:
            dense_line(axes, arm, 0.6, across=True)
    axes.set_ylabel("method and bytes sent")
    axes.set_xlabel(metric_label(arms))
    dense = "; line and band: dense" if any(arm.dense for arm in arms) else ""
    return sheet.finish(f"{heading(arms[0])}; {points_note(arms)}{dense}.")


ROOM = 1.35  # axis length relative to the longest bar, with room for its number


def to_target(arms: Sequence[Arm]) -> Figure | None:
    """Draw the seconds until the target, in table order, because the seeds rank no arm.

    None if the runs have no common target, or none has reached it.
    """
    found = race(arms)
    if found is None or not found.drawn:
        return None
    names = [name(arm) for arm in arms]
    sheet = sheet_of_rows(names)
    (axes,) = sheet.panels
    name_rows(axes, names)
    axes.set_xlim(0, ROOM * max(mean(own.timed) + (interval(own.timed) or 0) for own in found.arms if own.timed))
    for y, ((arm, look), of_arm) in enumerate(zip(with_looks(arms), found.arms, strict=True)):
        own, told, length = of_arm.timed, of_arm.untimed, 0.0
        if own:
            told, length = _told(own, arm.n), mean(own) + (interval(own) or 0)
            axes.barh(y, mean(own), height=0.6, color=look.colour, alpha=0.85, zorder=2)
            interval_bar(axes, (mean(own), y), interval(own), "#777777", across=True)
            if arm.dense:
                axes.axvline(mean(own), color="black", linewidth=0.6, zorder=1)
        beside: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": SMALL, "zorder": 4}
        axes.annotate(told, (length, y), (4, 0), **beside)
    axes.set_ylabel("method")
    axes.set_xlabel(f"{found.how} time to {found.shown} [s]")
    dense = "; line: dense" if any(arm.dense for arm in arms) else ""
    bars = "; with Student's 95 % t-interval" if several(arms) else ""
    return sheet.finish(f"{heading(arms[0])}; {seeds(arms)}; to the {first_look(arms)} that reached it{bars}{dense}.")


def _told(seconds: Sequence[float], seeds: int) -> str:
    """Return `12.3 ± 0.4 s`, and the number of seeds that reached the target if not all did."""
    half = interval(seconds)
    text = digits(mean(seconds)) + (f" ± {digits(half, 2)}" if half else "") + " s"
    return text if len(seconds) == seeds else f"{text}, reached by {len(seconds)} of {seeds}"


# Tol's light colours (2021) and a purple, none of a method; neighbours are distinct under colour blindness
STEP = {
    "data": "#DDDDDD",
    "compute": "#77AADD",
    "compute and exchange, not told apart": "#77AADD",
    "waiting for the exchange": "#EE8866",
    "update": "#44BB99",
    "policy": "#444444",
}
EXCHANGE = {"encode": "#EEDD88", "communication": "#997700", "decode": "#AA4499"}
PARTS = STEP | EXCHANGE
DDP = "compute and exchange, not told apart"
HATCHES = {DDP: "////"}
COLUMNS = {"waiting for the exchange": "exposed", "communication": "comm"}  # parts whose column has another name


class Bar(NamedTuple):
    """One row: seconds of a step by part; `exchange`: whether the parts of the exchange were measured."""

    name: str
    parts: dict[str, float]
    exchange: bool


def breakdown(arms: Sequence[Arm]) -> Figure | None:
    """Draw the milliseconds of a step as stacked bars, and separately the exchange's parts, which may run concurrently.

    Arms whose policy distinguishes critical regimes also have a bar for each regime. Users' own loops without times in
    their rows have no bar.
    """
    arms = [arm for arm in arms if tells_times(arm)]
    rows = [bar for arm in arms for bar in bars(arm)]
    if not any(sum(bar.parts.values()) for bar in rows) or not all(
        "compute_seconds" in arm.runs[0].rows[-1] for arm in arms
    ):
        return None
    beside = any(bar.exchange for bar in rows)
    names = [bar.name for bar in rows]
    sheet = sheet_of_rows(names, 2 if beside else 1)
    shared = any(not arm.attached and not communicates(arm) for arm in arms)
    _stack(sheet.panels[0], rows, STEP)
    sheet.panels[0].set_xlabel("step of all workers [ms]" if shared and not beside else "step [ms]")
    for axes in sheet.panels[1:]:
        _stack(axes, rows, EXCHANGE)
        axes.set_xlabel("its exchange [ms]")
        for y, bar in enumerate(rows):
            if not bar.exchange:
                axes.annotate("not measured", (0, y), (3, 0), textcoords="offset points", va="center", fontsize=SMALL)
    if len(sheet.panels) == 2 and sheet.columns == 2:
        sheet.panels[1].tick_params(labelleft=False)
        sheet.panels[1].set_ylabel("")
    note = f"{heading(arms[0])}; {seeds(arms)}; mean over the steps after step 1, and over the seeds."
    used = [part for part in PARTS if any(bar.parts[part] for bar in rows)]
    handles = [Patch(facecolor=PARTS[p], edgecolor="white", hatch=HATCHES.get(p), label=p) for p in used]
    return sheet.finish(note, handles)


def _stack(axes: Axes, rows: Sequence[Bar], colours: dict[str, str]) -> None:
    start = np.zeros(len(rows))
    for part, colour in colours.items():
        lengths = np.array([1000 * bar.parts[part] for bar in rows])
        bar: dict[str, Any] = {"color": colour, "edgecolor": "white", "linewidth": 0.5, "hatch": HATCHES.get(part)}
        axes.barh(np.arange(len(rows)), lengths, left=start, height=0.72, **bar)
        start += lengths
    name_rows(axes, [bar.name for bar in rows])
    axes.set_xlim(0, 1.04 * (start.max() or 1.0))
    axes.set_ylabel("method")


def bars(arm: Arm) -> list[Bar]:
    """Return the bar of the arm, followed by one for each regime if its policy distinguishes two and both occurred."""
    measured = any(run.rows[-1].get("comm_seconds") is not None for run in arm.runs)
    found = [Bar(name(arm), parts(arm), measured)]
    shares = [critical_share(run) for run in arm.runs]
    critical = [None if share is None else {e for e, part in enumerate(share) if part > 0.5} for share in shares]
    for text, inside in (("critical epochs", True), ("other epochs", False)):
        chosen = [
            (run, [e for e in range(len(run.rows)) if (e in epochs) == inside])
            for run, epochs in zip(arm.runs, critical, strict=True)
            if epochs is not None and 0 < len(epochs) < len(run.rows)
        ]
        if chosen:
            found.append(Bar(f"… {text}", _mean([split(run, epochs) for run, epochs in chosen]), measured))
    return found


def tells_times(arm: Arm) -> bool:
    """Whether its rows contain the time of each part of a step; optional in rows of a user's own loop."""
    return not arm.attached or arm.runs[0].rows[-1].get("compute_seconds") is not None


def parts(arm: Arm) -> dict[str, float]:
    """Return the seconds of a step by part, averaged over the seeds; the first step is not timed."""
    return _mean([split(run, range(len(run.rows))) for run in arm.runs])


def split(run: Run, epochs: Collection[int]) -> dict[str, float]:
    """Return the seconds of a step by part, in some epochs of a run."""
    found, steps = dict.fromkeys(PARTS, 0.0), 0
    ddp, measured = is_ddp(run.config), run.rows[-1].get("comm_seconds") is not None
    for epoch in epochs:
        row, before = run.rows[epoch], run.rows[epoch - 1] if epoch else {}
        steps += (row.get("step") or 0) - (before.get("step") or 1)
        for part in PARTS:
            key = f"{COLUMNS.get(part, part)}_seconds"
            if part in STEP or measured:
                found[part] += (row.get(key) or 0.0) - (before.get(key) or 0.0)
    if ddp:
        found[DDP], found["compute"] = found["compute"], 0.0
    return {part: spent / max(steps, 1) for part, spent in found.items()}


def _mean(found: Sequence[dict[str, float]]) -> dict[str, float]:
    return {part: float(np.mean([own[part] for own in found])) for part in PARTS}
