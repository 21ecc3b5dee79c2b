"""What bytes and modelled time buy: one marker per arm, and which arms no other one beats in both."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accordion_bench.report.arms import Arm
from accordion_bench.report.colours import Look, looks
from accordion_bench.report.figures.series import WORST, ends, floor, interval, metric_of, seeds, several
from accordion_bench.report.figures.style import Sheet, bytes_axis, entry, interval_bar, metric_label
from accordion_bench.report.words import heading, link

BYTES = "sent by a worker's link [bytes, log scale]"


def modelled(arms: Sequence[Arm]) -> dict[str, Figure]:
    """The figure of modelled time, where all arms have it."""
    known = all(arm.values("modelled_seconds") for arm in arms) and any(arm.mean("wire_bytes") for arm in arms)
    return {"tradeoff": tradeoff(arms)} if known else {}


def tradeoff(arms: Sequence[Arm]) -> Figure:
    """The metric after the last epoch against bytes on the wire, and against modelled time: one marker per arm.

    Arms that send nothing, like the one-worker control, have no place on either axis.
    """
    shown = _shown(arms)
    sheet = Sheet(2, height=2.4)
    low = False
    for axes, x in zip(sheet.panels, ("wire_bytes", "modelled_seconds"), strict=True):
        low = _points(axes, shown, x) or low
    bars = "; bars: Student's 95 % t-interval" if several(arms) else ""
    down = f"; {_arrow(arms)}: further {'down' if _arrow(arms) == '↓' else 'up'}, at this number" if low else ""
    note = f"{seeds(arms)}; after the last epoch{bars}{down}. Modelled, not measured: {_links(shown)}."
    return sheet.finish(heading(arms[0]), note, [entry(look, arm.label, line=False) for arm, look in shown])


def pareto(arms: Sequence[Arm]) -> Figure | None:
    """The same with the Pareto front: arms on it are not beaten by any arm that sends less, or needs less time."""
    shown = _shown(arms)
    if len(shown) < 2:
        return None
    xs = ["wire_bytes"] + ["modelled_seconds"] * all(arm.values("modelled_seconds") for arm, _ in shown)
    sheet = Sheet(len(xs), height=2.4)
    for axes, x in zip(sheet.panels, xs, strict=True):
        places = [(arm.mean(x), float(np.mean(ends(arm)))) for arm, _ in shown]
        on_front = front(arms, places)
        corners = sorted(places[i] for i in on_front)
        axes.step(*zip(*corners, strict=True), where="post", color="#777777", linewidth=1, zorder=1)
        _points(axes, shown, x, bars=False, faded=set(range(len(shown))) - on_front)
    model = f" Modelled, not measured: {_links(shown)}." if len(xs) > 1 else ""
    note = f"{seeds(arms)}; after the last epoch; line: Pareto front of the means; pale: beaten by another arm.{model}"
    return sheet.finish(heading(arms[0]), note, [entry(look, arm.label, line=False) for arm, look in shown])


def front(arms: Sequence[Arm], places: Sequence[tuple[float, float]]) -> set[int]:
    """Which (cost, metric) no other one beats: none costs at most as much and is at least as good, and differs."""
    of = metric_of(arms)

    def beaten(cost: float, score: float) -> bool:
        return any(c <= cost and of.reaches(s, score) and (c, s) != (cost, score) for c, s in places)

    return {i for i, place in enumerate(places) if not beaten(*place)}


def _points(
    axes: Axes, shown: Sequence[tuple[Arm, Look]], x: str, bars: bool = True, faded: Sequence[int] | set[int] = ()
) -> bool:
    """One marker per arm; returns whether one is too bad for its place."""
    arms = [arm for arm, _ in shown]
    of, arrow = metric_of(arms), _arrow(arms)
    means = [float(np.mean(ends(arm))) for arm in arms]
    best = max(means) if of.higher_is_better else min(means)
    worst = floor(of, best)
    for i, (arm, look) in enumerate(shown):
        at, y, errors = arm.mean(x), means[i], (interval(ends(arm)), interval(arm.values(x)))
        if of.better(worst, y):
            number = f"{y:.0f} %" if of.percent else f"{y:.3g}"
            axes.annotate(f"{arrow} {number}", (at, worst), (5, 0), textcoords="offset points", va="center", fontsize=7)
            y, errors = worst, (None, errors[1])
        alpha = 0.35 if i in faded else 1.0
        if bars:
            for across, half in enumerate(errors):
                interval_bar(axes, at, y, half, across=bool(across), color=look.colour, alpha=0.6, zorder=2)
        axes.plot([at], [y], zorder=3, alpha=alpha, **look.point)
    bottom, top = axes.get_ylim()
    if of.percent:
        axes.set_ylim(max(bottom, worst - 1), min(top, 100.5))
    elif not of.higher_is_better:
        axes.set_ylim(max(bottom, 0), min(top, 1.02 * worst))
    axes.set_ylabel(metric_label(of))
    axes.grid()
    if x == "wire_bytes":
        spent = [arm.mean(x) for arm in arms]
        bytes_axis(axes, min(spent), max(spent))
        axes.set_xlabel(BYTES)
    else:
        axes.set_xlim(left=0)
        axes.set_xlabel("modelled time [s]")
    return any(of.better(worst, mean) for mean in means)


def _shown(arms: Sequence[Arm]) -> list[tuple[Arm, Look]]:
    return [pair for pair in zip(arms, looks(arms), strict=True) if pair[0].mean("wire_bytes")]


def _arrow(arms: Sequence[Arm]) -> str:
    return "↓" if metric_of(arms).higher_is_better else "↑"


def _links(shown: Sequence[tuple[Arm, Look]]) -> str:
    return "; ".join(sorted({link(arm.config["network"]) for arm, _ in shown}))


__all__ = ["WORST", "front", "modelled", "pareto", "tradeoff"]
