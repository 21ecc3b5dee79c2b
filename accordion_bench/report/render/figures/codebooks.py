"""Where the quantisation levels of a policy lie, over training."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.read.load import Run
from accordion_bench.report.render.captions import heading
from accordion_bench.report.render.figures.curves import EPOCHS
from accordion_bench.report.render.figures.levels import MAPS
from accordion_bench.report.render.figures.marks import log_axis
from accordion_bench.report.render.figures.sheet import Sheet
from accordion_bench.report.render.looks import looks


def codebooks(arms: Sequence[Arm]) -> Figure | None:
    """One panel for each number of bits of an arm whose policy fits levels: those above 0, epoch by epoch."""
    books = [
        (arm, look, bits, positive)
        for arm, look in zip(arms, looks(arms), strict=True)
        for bits, positive in levels_by_epoch(arm.runs[0]).items()
    ]
    if not books:
        return None
    shown = books[:MAPS]
    sheet = Sheet(len(shown))
    lowest = min(level for *_, positive in shown for row in positive for level in row)
    for axes, (arm, look, bits, positive) in zip(sheet.panels, shown, strict=True):
        epochs = np.arange(1, len(positive) + 1)
        for of_one in zip(*positive, strict=True):
            axes.step(epochs, of_one, where="mid", color=look.colour)
        log_axis(axes, lowest, 1.0)
        axes.set_ylim(lowest / 1.3, 1.3)
        axes.set_xlabel(EPOCHS)
        axes.set_ylabel("level [of the norm, log scale]")
        axes.grid()
        sheet.titles[axes] = f"{arm.label}, {bits} bits"
    more = f" {len(books) - len(shown)} more codebooks are not shown." if len(books) > len(shown) else ""
    note = f"{heading(arms[0])}; one seed of each arm; levels above 0 of each epoch, those below mirror them."
    return sheet.finish(note + more)


def levels_by_epoch(run: Run) -> dict[str, list[list[float]]]:
    """By number of bits the levels above 0 [epochs, levels]; {} where no policy has moved any."""
    books = [(row.get("plan") or {}).get("codebooks") or {} for row in run.rows]
    kept = [bits for bits in books[0] if all(bits in own for own in books)]
    found = {bits: [[level for level in own[bits] if level > 0] for own in books] for bits in kept}
    return {bits: rows for bits, rows in found.items() if len({tuple(row) for row in rows}) > 1}
