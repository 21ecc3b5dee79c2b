"""Figures of the metric against one option: bits, bucket size, period H, number of workers."""

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from accordion_bench.methods.labels import drives, label, policies_of
from accordion_bench.options.units import counted
from accordion_bench.report.compare.arms import Arm, in_order
from accordion_bench.report.render import ArmLook, family, looks_of, with_looks
from accordion_bench.report.render.captions import heading, heading_end
from accordion_bench.report.render.figures.curves import points_note
from accordion_bench.report.render.figures.sheet import (
    MARGIN,
    Sheet,
    dense_line,
    end,
    end_limits,
    end_marker,
    entry,
    interval_bar,
    name_height,
    shown_end,
)
from accordion_bench.runs.metrics import metric

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
        if is_number(value) or whole:
            same = repr(sorted(options.items(), key=lambda item: item[0]))
            lines.setdefault(same, []).append((WHOLE if whole else value, arm))
            rest[same] = options
    names = {same: _name(points[0][1], key) for same, points in lines.items()}
    told = {same: name + _told(same, names, rest) for same, name in names.items()}
    return [(told[same], sorted(points, key=lambda p: _place(p[0], points))) for same, points in lines.items()]


def _told(same: str, names: dict[str, str], rest: dict[str, dict[str, Any]]) -> str:
    """Return the options that distinguish a line from others with the same name."""
    twins = [other for other in names if names[other] == names[same]]
    keys = {key for twin in twins for key in rest[twin].keys() | rest[same].keys()}
    differing = sorted(key for key in keys if any(rest[twin].get(key) != rest[same].get(key) for twin in twins))
    return "".join(f", {SHORT.get(key, key.rpartition('.')[2])} {_shown(rest[same].get(key))}" for key in differing)


def _name(arm: Arm, key: str) -> str:
    name = label(without(arm.config, key))
    return f"{name}, attached" if arm.attached else name


def without(config: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a configuration with one option set to null, so that its label does not include it."""
    group, _, name = key.partition(".")
    return {**config, group: {**config[group], name: None}} if name else config


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
    return f"{value:g}" if is_number(value) else str(value)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether an option is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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
    """Whether several arms of a line have the same number of workers."""
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
