"""How figures are written: one style file, the width of a paper's columns, and the formats."""

from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from accordion_bench.report.render.figures import font
from accordion_bench.report.render.formats import PAPERS

UNDATED = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}  # the same runs give the same file


def styled(paper: str = "two-column") -> AbstractContextManager[None]:
    """Everything drawn inside has the style of the style file, and this paper's width."""
    font.register()
    own = mpl.rc_params_from_file(Path(__file__).with_name("paper.mplstyle"), use_default_template=False)
    return mpl.rc_context({**own, "figure.figsize": (PAPERS[paper], own["figure.figsize"][1])})


def save(figure: Figure, stem: Path, formats: tuple[str, ...] = ("png",)) -> Path:
    """Write the figure; returns the PNG.

    Args:
        stem: of the files, without their ending.
        formats: some of FIGURES; a PNG is always written.
    """
    png = stem.with_name(f"{stem.name}.png")
    FigureCanvasAgg(figure).print_png(png)  # savefig would draw it twice, to lay out what has its place already
    for ending in sorted({*formats} - {"png"}):
        figure.savefig(stem.with_name(f"{stem.name}.{ending}"), metadata=UNDATED[ending])
    return png
