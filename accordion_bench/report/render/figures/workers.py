"""The metric against the number of workers, across settings."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.render.figures.points import points_note
from accordion_bench.report.render.figures.sheet import Sheet
from accordion_bench.report.render.figures.sweeps import Line, draw
from accordion_bench.report.render.looks import looks_of


def workers(settings: Sequence[Sequence[Arm]]) -> Figure | None:
    """One panel for each model and data set whose runs differ in the number of workers: a line for each method and H.

    Args:
        settings: the arms of each setting.
    """
    tasks: dict[str, list[Arm]] = {}
    for arm in [arm for arms in settings for arm in arms]:
        tasks.setdefault(task(arm), []).append(arm)
    panels = {name: lines for name, arms in tasks.items() if (lines := by_method(arms))}
    if not panels:
        return None
    sheet = Sheet(len(panels))
    for axes, (name, lines) in zip(sheet.panels, panels.items(), strict=True):
        of_lines = looks_of([(text, points[0][1].runs[0].label, points[0][1].dense) for text, points in lines])
        sheet.legends[axes] = draw(axes, lines, "workers", of_lines)
        if len(panels) > 1:
            sheet.titles[axes] = name
    shown = [arm for lines in panels.values() for _, points in lines for _, arm in points]
    return sheet.finish(f"{'; '.join(panels)}; {points_note(shown)}.")


def task(arm: Arm) -> str:
    """What is trained, without the number of workers: `resnet8 on digits, 60 epochs`, with the scale of small runs."""
    small = "" if arm.scale == "full" else f" (scale={arm.scale}: not the full experiment)"
    return f"{arm.chosen('model')} on {arm.chosen('dataset')}, {arm.config['epochs']} epochs{small}"


def by_method(arms: Sequence[Arm]) -> list[Line]:
    """Lines of at least two numbers of workers: arms of one name, by batch size where a number occurs twice."""
    named: dict[str, list[Arm]] = {}
    for arm in arms:
        name = arm.label.replace(f", {arm.batch_text}", "").replace(", 1 worker", "")
        named.setdefault(name, []).append(arm)
    lines: list[Line] = []
    for name, members in named.items():
        parts = {name: members}
        if len({arm.workers for arm in members}) < len(members):
            sizes = sorted({arm.config["batch_size"] for arm in members if arm.config["batch_size"] is not None})
            parts = {f"{name}, {b} samples each": [a for a in members if a.config["batch_size"] == b] for b in sizes}
            parts[name] = [arm for arm in members if arm.config["batch_size"] is None]
        for own, group in parts.items():
            points = sorted({arm.workers: arm for arm in group}.items())
            if len(points) > 1:
                lines.append((own, points))
    return lines
