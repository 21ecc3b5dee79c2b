"""Figures with one row per arm: names on the left, as high as they need."""

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.render.figures.sheet import LETTER, Sheet, lines

WIDEST = 0.36  # of the paper: names that are longer go on in the next line
ROW, AXIS = 0.17, 0.55  # inches of a line of text, and of the axis below
LEAST = 1.2  # inches of all rows: their axis has a label beside it


def name(arm: Arm) -> str:
    """A label as the name of a row: long ones in two lines."""
    return "\n".join(lines(arm.label, int(WIDEST * mpl.rcParams["figure.figsize"][0] / LETTER)))


def sheet_of_rows(names: Sequence[str], panels: int = 1) -> Sheet:
    """Panels side by side, or below each other on a narrow paper, whose rows have these names."""
    rows_of_text = sum(text.count("\n") + 1 for text in names)
    return Sheet(panels, height=max(ROW * rows_of_text, LEAST) + AXIS)


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """The names beside the rows, the first one at the top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
