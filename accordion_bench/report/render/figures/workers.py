"""The metric against the number of workers, across settings."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.render.figures.points import points_note
from accordion_bench.report.render.figures.sheet import Sheet
from accordion_bench.report.render.figures.sweeps import Line, draw
from accordion_bench.report.render.looks import family, looks_of
from accordion_bench.runs.metrics import metric


def workers(settings: Sequence[Sequence[Arm]]) -> Figure | None:
    """One panel for each task whose runs differ in the number of workers: a line for each method and H.

    A method of which several arms have one number of workers has no line: nobody knows which of them belong together.

    Args:
        settings: the arms of each setting.
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
    """What is trained and evaluated, without the number of workers: `resnet8 on digits, 60 epochs, accuracy`, with the
    part of the data, what tells the setting from another one, and the scale of small runs."""
    judged, subset = metric(arm.metric), arm.options.get("dataset.subset")
    told = [arm.task, f"{arm.config['epochs']} epochs", judged.words]
    told += [f"{subset:,} training {judged.counted}"] if isinstance(subset, int) else []
    if validation := arm.options.get("dataset.validation"):
        told.append(f"{validation:,} of the training samples held out")
    small = "" if arm.scale == "full" else f" (scale={arm.scale}: not the full experiment)"
    return ", ".join(filter(None, [*told, arm.apart])) + small


def _twice(line: Line) -> bool:
    """Whether several of its arms have one number of workers."""
    _, points = line
    return len({count for count, _ in points}) < len(points)


def by_method(arms: Sequence[Arm]) -> list[Line]:
    """Lines of at least two numbers of workers: arms of one name, by batch size where a number occurs twice."""
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
            sizes = sorted({arm.config["batch_size"] for arm in members if arm.config["batch_size"] is not None})
            parts = {f"{name}, {b} samples each": [a for a in members if a.config["batch_size"] == b] for b in sizes}
            parts[name] = [arm for arm in members if arm.config["batch_size"] is None]
        for own, group in parts.items():
            points = sorted(((arm.workers, arm) for arm in group), key=lambda point: point[0])
            if len({count for count, _ in points}) > 1:
                lines.append((own, points))
    return lines
