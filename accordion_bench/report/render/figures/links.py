"""The metric against modelled time, on links of several bandwidths."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.other_links import modelled_seconds
from accordion_bench.report.render.captions import heading, hidden, without_bytes
from accordion_bench.report.render.colours import looks
from accordion_bench.report.render.figures.curves import TOGETHER, curves, footnote, handles, limits_of, too_short
from accordion_bench.report.render.figures.points import points, points_note, time_axis
from accordion_bench.report.render.figures.style import Sheet


def accuracy_modelled(arms: Sequence[Arm], bandwidths: Sequence[float]) -> Figure | None:
    """One panel for each bandwidth: learning curves, or where there are many arms only their ends.

    Args:
        arms: of one setting.
        bandwidths: bit/s of each worker's link.
    """
    sending = [pair for pair in zip(arms, looks(arms), strict=True) if pair[0].sends()]
    times = {arm.label: modelled_seconds(arm, bandwidths) for arm, _ in sending}
    shown = [pair for pair in sending if np.isfinite(times[pair[0].label]).all()]
    if len(shown) < 2 or too_short(arms):
        return None
    sheet = Sheet(len(bandwidths), height=2.0)
    limits, many, at_edge = limits_of(shown), len(shown) > TOGETHER, False
    for i, (axes, bandwidth) in enumerate(zip(sheet.panels, bandwidths, strict=True)):
        of = {arm.label: times[arm.label][i] for arm, _ in shown}
        costs = [of[arm.label][:, -1].tolist() for arm, _ in shown]
        if many:
            at_edge = points(axes, shown, costs)
        else:
            curves(axes, shown, of, limits)
        time_axis(axes, costs)
        sheet.titles[axes] = f"{bandwidth / 1e9:g} Gbit/s"
    latencies = sorted({f"{arm.config['network']['latency'] * 1e6:g}" for arm, _ in shown})
    told = (
        "Modelled, not measured: measured computation of one worker + 8 x wire bytes / bandwidth + rounds x "
        f"{' or '.join(latencies)} µs, {hidden([arm for arm, _ in shown])}; "
        f"{points_note(arms, at_edge=at_edge) + '.' if many else footnote(arms)}"
    )
    return sheet.finish(heading(arms[0]), told + without_bytes(arms), handles(shown, not many))
