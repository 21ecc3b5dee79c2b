"""The page of runs as they stand now: those that go on are curves beside the others, and in no mean."""

from collections.abc import Sequence
from itertools import zip_longest

from accordion_bench.report.compare.running import arm_so_far, beside
from accordion_bench.report.read.load import Run
from accordion_bench.report.read.running import how_far
from accordion_bench.report.render.absent import left_out
from accordion_bench.report.render.page import Section, page
from accordion_bench.report.render.sound import sound
from accordion_bench.report.render.write import texts


def live_page(
    ended: Sequence[Run], running: Sequence[Run], folders: Sequence[tuple[str, str]] = (), follow: str = ""
) -> str:
    """The page as one HTML text, without the figures that are drawn for papers: they take longest.

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
    sections = [Section(arms, [], others) for arms, others in zip_longest(parts, curves, fillvalue=())]
    return page(sections, [], absent, follow)
