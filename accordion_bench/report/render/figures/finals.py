"""Figures of final values: one row per arm, and the metric against one option; and the breakdown of a step's time."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from accordion_bench.methods.labels import drives, label, policies_of
from accordion_bench.options.units import counted, digits
from accordion_bench.report.compare.arms import Arm, in_order
from accordion_bench.report.compare.beside import first_look, mean, race
from accordion_bench.report.compare.intervals import show_bytes
from accordion_bench.report.compare.times import communicates, is_ddp
from accordion_bench.report.read import Run
from accordion_bench.report.read.schema import is_finite
from accordion_bench.report.render import ArmLook, family, looks_of, with_looks
from accordion_bench.report.render.captions import heading, heading_end
from accordion_bench.report.render.figures.curves import points_note
from accordion_bench.report.render.figures.layers import critical_share
from accordion_bench.report.render.figures.sheet import (
    AXIS,
    LETTER,
    MARGIN,
    SMALL,
    Sheet,
    dense_line,
    end,
    end_limits,
    end_marker,
    entry,
    interval,
    interval_bar,
    metric_label,
    name_height,
    seeds,
    several,
    shown_end,
    wrapped,
)
from accordion_bench.runs.metrics import metric

WIDEST = 0.36  # of the paper's width; longer names are wrapped
ROW = 0.17  # inches per line of text
LEAST = 1.2  # least height of all rows in inches, for the label of their axis


def name(arm: Arm) -> str:
    """Return the label of a row, wrapped if it is long."""
    return wrapped(arm.label, int(WIDEST * mpl.rcParams["figure.figsize"][0] / LETTER))


def lines_of(names: Sequence[str]) -> list[int]:
    """Return the number of lines of text of each name."""
    return [text.count("\n") + 1 for text in names]


def row_places(names: Sequence[str]) -> list[float]:
    """Return the vertical position of each row, in lines of text: the middle of its name, so names never overlap."""
    lines = lines_of(names)
    return [sum(lines[:i]) + (own - 1) / 2 for i, own in enumerate(lines)]


def sheet_of_rows(names: Sequence[str], panels: int = 1) -> Sheet:
    """Return a sheet with panels for these rows, side by side, or stacked on narrow paper."""
    return Sheet(panels, height=max(ROW * sum(lines_of(names)), LEAST) + AXIS)


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Label the rows, the first one at the top."""
    axes.set_yticks(row_places(names), names)
    axes.set_ylim(sum(lines_of(names)) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def forest(arms: Sequence[Arm]) -> Figure:
    """Draw one row per arm, in table order: the metric after the last epoch with its 95 % t-interval."""
    names = [f"{name(arm)}   {show_bytes(arm.mean('wire_bytes')):>8}" for arm in arms]
    sheet = sheet_of_rows(names)
    (axes,) = sheet.panels
    name_rows(axes, names)
    axes.set_xlim(end_limits(arms))
    for y, (arm, look) in zip(row_places(names), with_looks(arms), strict=True):
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
    for y, (arm, look), of_arm in zip(row_places(names), with_looks(arms), found.arms, strict=True):
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
        for y, bar in zip(row_places(names), rows, strict=True):
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
    names = [bar.name for bar in rows]
    start = np.zeros(len(rows))
    for part, colour in colours.items():
        lengths = np.array([1000 * bar.parts[part] for bar in rows])
        bar: dict[str, Any] = {"color": colour, "edgecolor": "white", "linewidth": 0.5, "hatch": HATCHES.get(part)}
        axes.barh(row_places(names), lengths, left=start, height=0.72, **bar)
        start += lengths
    name_rows(axes, names)
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


# ---- the metric against one option


BITS, BUCKET, PERIOD = "compressor.bits", "compressor.bucket_size", "sync.period"
AXES = {
    BITS: "message [bits per coordinate]",
    BUCKET: "bucket size [coordinates]",
    PERIOD: "period H [steps]",
    "workers": "workers [count]",
}
SHORT = {BUCKET: "bucket", BITS: "bits", PERIOD: "H"}
BESIDE = 1.05  # factor by which points of several lines are shifted apart
WHOLE = "tensor"  # displayed bucket size of null

Line = tuple[str, list[tuple[Any, Arm]]]


def bits_bucket(arms: Sequence[Arm]) -> Figure | None:
    """Draw the metric against bits, one line per bucket size, and against bucket size, one line per method and bits."""
    fixed = [arm for arm in arms if not _driven(arm, "level")]
    return _figure(arms, {key: along(fixed, key) for key in (BITS, BUCKET)})


def period(arms: Sequence[Arm]) -> Figure | None:
    """Draw the metric against the period of local methods, with dense as a line."""
    fixed = [arm for arm in arms if not _driven(arm, "period")]
    return _figure(arms, {PERIOD: along(fixed, PERIOD)})


def along(arms: Sequence[Arm], key: str) -> list[Line]:
    """Group arms that differ in one option only into named lines: (value, arm) by ascending value."""
    lines: dict[str, list[tuple[Any, Arm]]] = {}
    rest: dict[str, dict[str, Any]] = {}
    for arm in arms:
        options = dict(arm.options)
        value = options.pop(key, None)
        whole = key == BUCKET and value is None and "bits" in (arm.config.get("compressor") or {})
        if is_finite(value) or whole:
            same = repr(sorted(options.items(), key=lambda item: item[0]))
            lines.setdefault(same, []).append((WHOLE if whole else value, arm))
            rest[same] = options
    names = {same: _name(points[0][1], key) for same, points in lines.items()}
    told = {same: name + _apart(same, names, rest) for same, name in names.items()}
    return [(told[same], sorted(points, key=lambda p: _place(p[0], points))) for same, points in lines.items()]


def _apart(same: str, names: dict[str, str], rest: dict[str, dict[str, Any]]) -> str:
    """Return the options that distinguish a line from others with the same name."""
    twins = [other for other in names if names[other] == names[same]]
    keys = {key for twin in twins for key in rest[twin].keys() | rest[same].keys()}
    differing = sorted(key for key in keys if any(rest[twin].get(key) != rest[same].get(key) for twin in twins))
    return "".join(f", {SHORT.get(key, key.rpartition('.')[2])} {_shown(rest[same].get(key))}" for key in differing)


def _name(arm: Arm, key: str) -> str:
    """Return the method's name without the option `key`, which is set to null for it."""
    group, _, option = key.partition(".")
    name = label({**arm.config, group: {**arm.config[group], option: None}})
    return f"{name}, attached" if arm.attached else name


def _figure(arms: Sequence[Arm], swept: dict[str, list[Line]]) -> Figure | None:
    shown = {key: lines for key, lines in swept.items() if any(len(points) > 1 for _, points in lines)}
    if not shown:
        return None
    sheet = Sheet(len(shown))
    dense, of = [arm for arm in arms if arm.dense][:1], {arm.label: look for arm, look in with_looks(arms)}
    for axes, (key, lines) in zip(sheet.panels, shown.items(), strict=True):
        sheet.legends[axes] = draw(axes, lines, key, [of[points[0][1].label] for _, points in lines], dense)
    band = "; black line and band: dense" if dense else ""
    return sheet.finish(f"{heading(arms[0])}; {points_note(arms)}{band}.")


def draw(
    axes: Axes, lines: Sequence[Line], key: str, of_lines: Sequence[ArmLook], dense: Sequence[Arm] = ()
) -> list[Any]:
    """Draw one line per method, and a horizontal one for dense; return the entries of the legend."""
    shown = [arm for _, points in lines for _, arm in points]
    values = sorted({_place(value, points) for _, points in lines for value, _ in points})
    whole = {_place(value, points) for _, points in lines for value, _ in points if value == WHOLE}
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(values, [WHOLE if value in whole else f"{value:g}" for value in values])
    axes.set_xlim(values[0] / MARGIN, values[-1] * MARGIN)
    axes.set_ylim(end_limits([*shown, *dense]))
    shifts = np.geomspace(1 / BESIDE, BESIDE, len(lines)) if len(lines) > 1 else [1.0]
    for (_, points), look, aside in zip(lines, of_lines, shifts, strict=True):
        xs, found = [_place(value, points) * aside for value, _ in points], [end(arm) for _, arm in points]
        axes.plot(xs, [y for y, _ in found], color=look.colour, linestyle=look.line, zorder=3, gid="curve")
        for x, (y, half), (_, arm) in zip(xs, found, points, strict=True):
            interval_bar(axes, (x, y), half, look.colour)
            end_marker(axes, (x, y), look, shown_end(arm))
    for arm in dense:
        dense_line(axes, arm, 0.8)
    axes.set_xlabel(AXES[key])
    name_height(axes, shown)
    axes.grid()
    entries = [entry(look, name) for (name, _), look in zip(lines, of_lines, strict=True)]
    return entries + [entry(look, arm.label) for arm, look in with_looks(dense)]


def _driven(arm: Arm, what: str) -> bool:
    return any(drives(policy) == what for policy in policies_of(arm.config).values())


def _place(value: Any, points: Sequence[tuple[Any, Arm]]) -> float:
    """Return the position of a value: whole tensors are to the right of all bucket sizes."""
    return 2 * max([v for v, _ in points if v != WHOLE] or [2**15]) if value == WHOLE else value


def _shown(value: Any) -> str:
    if value is None:
        return WHOLE
    return f"{value:g}" if is_finite(value) else str(value)


def workers(settings: Sequence[Sequence[Arm]]) -> Figure | None:
    """Draw one panel for each task whose runs differ in the number of workers: a line for each method and H.

    A method with several arms at one number of workers has no line, because its arms cannot be matched.
    """
    tasks: dict[str, list[Arm]] = {}
    for arm in [arm for arms in settings for arm in arms]:
        tasks.setdefault(task(arm), []).append(arm)
    found = [(name, line) for name, arms in tasks.items() for line in by_method(arms)]
    panels: dict[str, list[Line]] = {}
    for name, line in found:
        if not _twice(line):
            panels.setdefault(name, []).append(line)
    if not panels:
        return None
    sheet = Sheet(len(panels))
    for axes, (name, lines) in zip(sheet.panels, panels.items(), strict=True):
        of_lines = looks_of([(text, family(points[0][1]), points[0][1].dense) for text, points in lines])
        sheet.legends[axes] = draw(axes, lines, "workers", of_lines)
        if len(panels) > 1:
            sheet.titles[axes] = name
    shown = [arm for lines in panels.values() for _, points in lines for _, arm in points]
    twice = ", ".join(f"{line[0]} on {name}" if len(tasks) > 1 else line[0] for name, line in found if _twice(line))
    left_out = f" Not drawn, as several of its arms have one number of workers: {twice}." if twice else ""
    return sheet.finish(f"{'; '.join(panels)}; {points_note(shown)}.{left_out}")


def task(arm: Arm) -> str:
    """Return what is trained and evaluated, without the number of workers: `resnet8 on digits, 60 epochs, accuracy`."""
    return f"{arm.task}, {counted(arm.config['epochs'], 'epoch')}, {metric(arm.metric).words}{heading_end(arm)}"


def _twice(line: Line) -> bool:
    _, points = line
    return len({count for count, _ in points}) < len(points)


def by_method(arms: Sequence[Arm]) -> list[Line]:
    """Return lines over at least two numbers of workers: arms of one name, split by batch size if a number repeats."""
    named: dict[str, list[Arm]] = {}
    methods: dict[str, set[str]] = {}
    for arm in arms:
        methods.setdefault(arm.called or arm.method, set()).add(arm.method)
    for arm in arms:
        name = arm.label.replace(f", {arm.batch_text}", "").replace(", 1 worker", "")
        if arm.called and len(methods[arm.called]) > 1 and arm.method not in name:
            name = f"{name} ({arm.method})"
        named.setdefault(name, []).append(arm)
    lines: list[Line] = []
    for name, members in named.items():
        parts = {name: members}
        if len({arm.workers for arm in members}) < len(members):
            sizes = in_order({size for arm in members if (size := arm.batch_each) is not None})
            parts = {f"{name}, {b} samples each": [a for a in members if a.batch_each == b] for b in sizes}
            parts[name] = [arm for arm in members if arm.batch_each is None]
        for own, group in parts.items():
            points = sorted(((arm.workers, arm) for arm in group), key=lambda point: point[0])
            if len({count for count, _ in points}) > 1:
                lines.append((own, points))
    return lines
