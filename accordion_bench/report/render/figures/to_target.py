"""Time to a fixed metric value: one row each."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.target import clock_of, mean, reached, target_of
from accordion_bench.report.render.captions import heading
from accordion_bench.report.render.colours import looks
from accordion_bench.report.render.figures.forest import name, named_width
from accordion_bench.report.render.figures.series import interval, seeds, several
from accordion_bench.report.render.figures.style import SMALL, Sheet, interval_bar
from accordion_bench.runs.metrics import metric


def to_target(arms: Sequence[Arm]) -> Figure | None:
    """Seconds until the target, fastest at the top; None where the runs have no common target, or none reached it."""
    target, column = target_of(arms), clock_of(arms)
    if target is None or len(arms) < 2:
        return None
    found = {arm.label: reached(arm, target, column).seconds for arm in arms}
    if not any(found.values()):
        return None
    pairs = zip(arms, looks(arms), strict=True)
    rows = sorted(pairs, key=lambda row: mean(found[row[0].label]) if found[row[0].label] else float("inf"))
    names = [name(arm) for arm, _ in rows]
    rows_of_text = sum(text.count("\n") + 1 for text in names)
    sheet = Sheet(1, height=max(0.17 * rows_of_text + 0.1, 1.2), width=named_width(names))
    (axes,) = sheet.panels
    longest = max(mean(own) for own in found.values() if own)
    for y, (arm, look) in enumerate(rows):
        own = found[arm.label]
        if own:
            axes.barh(y, mean(own), height=0.6, color=look.colour, alpha=0.85, zorder=2)
            interval_bar(axes, mean(own), y, interval(own), across=True, color="black", zorder=3)
        if len(own) < arm.n:
            text = f"reached by {len(own)} of {arm.n}" if own else "not reached"
            axes.text(0.02 * longest, y, text, va="center", fontsize=SMALL, color="white" if own else "black", zorder=4)
        if arm.dense and own:
            axes.axvline(mean(own), color="black", linewidth=0.6, zorder=1)
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_ylabel("method")
    how = "measured" if column == "seconds" else "modelled"
    axes.set_xlabel(f"{how} time to {metric(arms[0].metric).show(target)} [s]")
    axes.grid(axis="x")
    dense = "; line: dense" if any(arm.dense for arm in arms) else ""
    bars = "; bars: Student's 95 % t-interval" if several(arms) else ""
    return sheet.finish(heading(arms[0]), f"{seeds(arms)}; to the end of the first epoch that reached it{bars}{dense}.")
