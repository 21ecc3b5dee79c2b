"""What bytes and modelled time buy: one marker per arm, and which arms no other one beats in both."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.show import show_link
from accordion_bench.report.render.captions import heading, without_bytes
from accordion_bench.report.render.colours import Look, looks
from accordion_bench.report.render.figures.points import points, points_note, sent_axis, time_axis
from accordion_bench.report.render.figures.series import ends, metric_of
from accordion_bench.report.render.figures.style import Sheet, entry

AXES = {"wire_bytes": sent_axis, "modelled_seconds": time_axis}


def modelled(arms: Sequence[Arm]) -> dict[str, Figure]:
    """The figure of modelled time, where all arms have it."""
    known = all(arm.values("modelled_seconds") for arm in arms) and any(arm.sends() for arm in arms)
    return {"tradeoff": tradeoff(arms)} if known else {}


def tradeoff(arms: Sequence[Arm]) -> Figure:
    """The metric after the last epoch against bytes on the wire, and against modelled time: one marker per arm.

    Arms that send nothing, like the one-worker control, have no place on either axis.
    """
    shown = _shown(arms)
    sheet = Sheet(2, height=2.4)
    at_edge = False
    for axes, (x, name_axis) in zip(sheet.panels, AXES.items(), strict=True):
        costs = [arm.values(x) for arm, _ in shown]
        at_edge = points(axes, shown, costs)
        name_axis(axes, costs)
    note = f"{points_note(arms, at_edge=at_edge)}. Modelled, not measured: {_links(shown)}.{without_bytes(arms)}"
    return sheet.finish(heading(arms[0]), note, _handles(shown))


def pareto(arms: Sequence[Arm]) -> Figure | None:
    """The same with the Pareto front: arms on it are not beaten by any arm that sends less, or needs less time."""
    shown = _shown(arms)
    if len(shown) < 2:
        return None
    xs = ["wire_bytes"]
    if all(arm.values("modelled_seconds") for arm, _ in shown):
        xs.append("modelled_seconds")
    sheet = Sheet(len(xs), height=2.4)
    at_edge = False
    for axes, x in zip(sheet.panels, xs, strict=True):
        costs = [arm.values(x) for arm, _ in shown]
        places = [(arm.mean(x), float(np.mean(ends(arm)))) for arm, _ in shown]
        on_front = front(arms, places)
        corners = sorted(places[i] for i in on_front)
        axes.step(*zip(*corners, strict=True), where="post", color="#777777", linewidth=1, zorder=1)
        at_edge = points(axes, shown, costs, bars=False, on_front=on_front)
        AXES[x](axes, costs)
    model = f" Modelled, not measured: {_links(shown)}." if len(xs) > 1 else ""
    note = f"{points_note(arms, False, at_edge)}; line: Pareto front of the means; pale: beaten by another arm.{model}"
    note += without_bytes(arms)
    return sheet.finish(heading(arms[0]), note, _handles(shown))


def front(arms: Sequence[Arm], places: Sequence[tuple[float, float]]) -> set[int]:
    """Which (cost, metric) no other one beats: none costs at most as much and is at least as good, and differs."""
    of = metric_of(arms)

    def beaten(cost: float, score: float) -> bool:
        return any(c <= cost and of.reaches(s, score) and (c, s) != (cost, score) for c, s in places)

    return {i for i, place in enumerate(places) if not beaten(*place)}


def _shown(arms: Sequence[Arm]) -> list[tuple[Arm, Look]]:
    return [pair for pair in zip(arms, looks(arms), strict=True) if pair[0].sends()]


def _handles(shown: Sequence[tuple[Arm, Look]]) -> list[object]:
    return [entry(look, arm.label, line=False) for arm, look in shown]


def _links(shown: Sequence[tuple[Arm, Look]]) -> str:
    return "; ".join(sorted({show_link(arm.config["network"]) for arm, _ in shown}))
