"""The page of runs as they stand now: those that go on are curves beside the others, and in no mean."""

import tempfile
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.running import arm_so_far, beside
from accordion_bench.report.read.load import Run
from accordion_bench.report.read.running import how_far
from accordion_bench.report.render import figures
from accordion_bench.report.render.page import Section, page
from accordion_bench.report.render.sound import sound
from accordion_bench.report.render.write import left_out, texts


def live_page(
    ended: Sequence[Run], running: Sequence[Run], folders: Sequence[tuple[str, str]] = (), follow: str = ""
) -> str:
    """The page as one HTML text.

    Args:
        ended: finished runs, and unfinished ones that go on no more.
        running: those that go on.
        folders: names of those without a run, and why; see `missing_runs.no_runs`.
        follow: the script by which the page follows its runs.
    """
    ended, parts, repeats, _ = sound(ended, texts)
    absent = left_out(ended, repeats, folders)
    if running:
        lines = [f"{run.name} ({run.label}, seed {run.seed}): {how_far(run)}" for run in running]
        absent = {"Running, in no mean": lines, **absent}
    curves = beside(parts, [arm for run in running if (arm := arm_so_far(run))])
    with tempfile.TemporaryDirectory() as scratch:
        sections = [
            Section(arms, _curves([*arms, *others], Path(scratch), f"-{i}"), others)
            for i, (arms, others) in enumerate(zip_longest(parts, curves, fillvalue=()))
        ]
        return page(sections, [], absent, follow)


def _curves(arms: Sequence[Arm], out: Path, suffix: str) -> list[Path]:
    """The learning curves; none where they cannot be drawn."""
    try:
        png = figures.draw_one("accuracy_epoch", arms, out, suffix)
    except Exception:  # of a stranger's runs
        return []
    return [png] if png else []
