"""What compression loses, over training."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.render.captions import heading
from accordion_bench.report.render.figures.curves import panes
from accordion_bench.report.render.figures.marks import EPOCHS, entry, log_axis
from accordion_bench.report.render.figures.series import column, seeds, several
from accordion_bench.report.render.figures.sheet import Sheet
from accordion_bench.report.render.looks import looks


def variance(arms: Sequence[Arm]) -> Figure | None:
    """||x - sent||^2 / ||x||^2 in one exchange of each epoch: an unbiased quantiser's normalised variance."""
    errors = {arm.label: column(arm, "compression_error") for arm in arms}
    lossy = [pair for pair in zip(arms, looks(arms), strict=True) if (np.nan_to_num(errors[pair[0].label]) > 0).any()]
    if not lossy or all(own.shape[1] < 2 for own in errors.values()):
        return None
    parts = panes(lossy)
    sheet = Sheet(len(parts))
    everything = np.concatenate([errors[arm.label].ravel() for arm, _ in lossy])
    everything = everything[everything > 0]
    for axes, part in zip(sheet.panels, parts, strict=True):
        for arm, look in part:
            own = errors[arm.label]
            epochs = np.arange(1, own.shape[1] + 1)
            axes.plot(epochs, own.mean(axis=0), color=look.colour, linestyle=look.line, zorder=2, gid="curve")
            if arm.n > 1:
                low, high = own.min(axis=0), own.max(axis=0)
                axes.fill_between(epochs, low, high, color=look.colour, alpha=0.13, linewidth=0, zorder=1)
            axes.plot(epochs[-1:], own.mean(axis=0)[-1:], zorder=3, **look.point)
        log_axis(axes, everything.min(), everything.max())
        axes.set_ylim(everything.min() / 1.3, everything.max() * 1.3)
        axes.set_xlabel(EPOCHS)
        axes.set_ylabel("|x - sent|² / |x|² [-, log scale]")
        axes.grid()
    bands = "; lines: mean over the seeds; bands: their range" if several(arms) else ""
    note = (
        f"{heading(arms[0])}; {seeds(arms)}{bands}; worker 0, one exchange of each epoch; of unbiased quantisers this "
        "is the normalised variance."
    )
    return sheet.finish(note, [entry(look, arm.label) for arm, look in lossy])
