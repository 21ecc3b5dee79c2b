"""What bytes and modelled time buy: one marker per arm, and which arms others are shown to beat."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from accordion_bench.network.link_options import show_link
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.ranking import beaten, front
from accordion_bench.report.compare.timed import unlike
from accordion_bench.report.render.captions import heading, without_bytes
from accordion_bench.report.render.figures.marks import entry
from accordion_bench.report.render.figures.points import points, points_note, sent_axis, time_axis
from accordion_bench.report.render.figures.series import ends, several
from accordion_bench.report.render.figures.sheet import Sheet
from accordion_bench.report.render.looks import looks

AXES = {"wire_bytes": sent_axis, "modelled_seconds": time_axis}


def tradeoff(arms: Sequence[Arm]) -> Figure | None:
    """The metric after the last epoch against bytes on the wire, and against modelled time where all arms have it.

    Pale: arms that another one beats. A line: the front, where intervals separate its arms. Neither by modelled times
    of several networks, machines or numbers of threads.
    Arms that send nothing, like the one-worker control, have no place on either axis.
    """
    shown = [pair for pair in zip(arms, looks(arms), strict=True) if pair[0].sends()]
    placed = [arm for arm, _ in shown]
    if len(placed) < 2:
        return None
    xs = [x for x in AXES if all(arm.values(x) for arm in placed)]
    apart = _apart(placed) if len(xs) > 1 else ""
    sheet, fronts = Sheet(len(xs)), {x: front(placed, x) for x in xs if x == "wire_bytes" or not apart}
    for axes, x in zip(sheet.panels, xs, strict=True):
        costs = [arm.values(x) for arm in placed]
        AXES[x](axes, costs)
        points(axes, shown, costs, pale=beaten(placed, x) if x in fronts else ())
        corners = [(arm.mean(x), float(np.mean(ends(arm)))) for arm in fronts.get(x, ())]
        if len(corners) > 1:
            axes.step(*zip(*corners, strict=True), where="post", color="#777777", linewidth=1, zorder=1, gid="front")
    model = f" Modelled, not measured: {_links(placed)}." if len(xs) > 1 else ""
    model += f" Modelled times do not compare, because {apart}." if apart else ""
    note = f"{heading(arms[0])}; {points_note(arms)}{_ranked(placed, fronts)}.{model}{without_bytes(arms)}"
    return sheet.finish(note, [entry(look, arm.label, line=False) for arm, look in shown])


def _ranked(arms: Sequence[Arm], fronts: dict[str, list[Arm]]) -> str:
    """What pale markers and the line are, or why there are none."""
    if not several(arms):
        return ""  # said beside the seeds
    pale = "; pale: another arm is shown better, and costs no more" if any(beaten(arms, x) for x in fronts) else ""
    if any(len(corners) > 1 for corners in fronts.values()):
        return f"{pale}; line: arms that are shown better than all that cost less"
    return f"{pale}; no front: no arm is shown better than all that cost less"


def _apart(arms: Sequence[Arm]) -> str:
    """Why modelled times of these arms do not compare; "" where they do."""
    if any(arm.config["network"] != arms[0].config["network"] for arm in arms):
        return "the arms differ in their network"
    return unlike(arms)


def _links(arms: Sequence[Arm]) -> str:
    return "; ".join(sorted({show_link(arm.config["network"]) for arm in arms}))
