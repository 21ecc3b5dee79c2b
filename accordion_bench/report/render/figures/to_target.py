"""Time to a fixed metric value: one row each."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from accordion_bench.options.units import digits
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.target import clock_of, first_look, mean, reached, target_of
from accordion_bench.report.render.captions import heading
from accordion_bench.report.render.figures.marks import interval_bar
from accordion_bench.report.render.figures.rows import name, name_rows, sheet_of_rows
from accordion_bench.report.render.figures.series import interval, seeds, several
from accordion_bench.report.render.figures.sheet import SMALL
from accordion_bench.report.render.looks import looks
from accordion_bench.runs.metrics import metric

ROOM = 1.35  # times the longest bar: for the number beside it


def to_target(arms: Sequence[Arm]) -> Figure | None:
    """Seconds until the target, in the table's order: the seeds rank no arm.

    None where the runs have no common target, or none reached it.
    """
    target, column = target_of(arms), clock_of(arms)
    if target is None or len(arms) < 2:
        return None
    found = [reached(arm, target, column) for arm in arms]
    if not any(own.timed for own in found):
        return None
    names = [name(arm) for arm in arms]
    sheet = sheet_of_rows(names)
    (axes,) = sheet.panels
    name_rows(axes, names)
    axes.set_xlim(0, ROOM * max(mean(own.timed) + (interval(own.timed) or 0) for own in found if own.timed))
    for y, (arm, look, of_arm) in enumerate(zip(arms, looks(arms), found, strict=True)):
        own = of_arm.timed
        if own:
            axes.barh(y, mean(own), height=0.6, color=look.colour, alpha=0.85, zorder=2)
            interval_bar(axes, mean(own), y, interval(own), "#777777", across=True)
        if arm.dense and own:
            axes.axvline(mean(own), color="black", linewidth=0.6, zorder=1)
        end = mean(own) + (interval(own) or 0) if own else 0
        axes.annotate(
            _told(own, arm.n) if own else of_arm.untimed,
            (end, y),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
            zorder=4,
        )
    axes.set_ylabel("method")
    how = "measured" if column == "seconds" else "modelled"
    axes.set_xlabel(f"{how} time to {metric(arms[0].metric).show(target)} [s]")
    dense = "; line: dense" if any(arm.dense for arm in arms) else ""
    bars = "; with Student's 95 % t-interval" if several(arms) else ""
    return sheet.finish(f"{heading(arms[0])}; {seeds(arms)}; to the {first_look(arms)} that reached it{bars}{dense}.")


def _told(seconds: Sequence[float], seeds: int) -> str:
    """`12.3 ± 0.4 s`, and how many seeds have come there, where not all have."""
    half = interval(seconds)
    text = digits(mean(seconds)) + (f" ± {digits(half, 2)}" if half else "") + " s"
    return text if len(seconds) == seeds else f"{text}, reached by {len(seconds)} of {seeds}"
