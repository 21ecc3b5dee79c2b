"""The metric against modelled time, on links of several bandwidths."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from accordion_bench.options.units import human_rate
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.other_links import modelled_seconds
from accordion_bench.report.render.captions import heading, hidden, without_bytes
from accordion_bench.report.render.figures.curves import TOGETHER, curves, footnote, handles, limits_of, too_short
from accordion_bench.report.render.figures.points import points, points_note, time_axis
from accordion_bench.report.render.figures.sheet import Sheet
from accordion_bench.report.render.looks import looks


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
    sheet = Sheet(len(bandwidths))
    limits, many = limits_of(shown), len(shown) > TOGETHER
    for i, (axes, bandwidth) in enumerate(zip(sheet.panels, bandwidths, strict=True)):
        of = {arm.label: times[arm.label][i] for arm, _ in shown}
        costs = [of[arm.label][:, -1].tolist() for arm, _ in shown]
        time_axis(axes, costs)
        if many:
            points(axes, shown, costs)
        else:
            curves(axes, shown, of, limits)
        sheet.titles[axes] = human_rate(bandwidth)
    latencies = sorted({f"{arm.config['network']['latency'] * 1e6:g}" for arm, _ in shown})
    note = (
        f"{heading(arms[0])}; {points_note(arms) + '.' if many else footnote(arms)} Modelled, not measured: measured "
        f"computation of one worker + 8 x wire bytes / bandwidth + rounds x {' or '.join(latencies)} µs, "
        f"{hidden([arm for arm, _ in shown])}.{without_bytes(arms)}"
    )
    return sheet.finish(note, handles(shown, not many))
