"""The sheet that every figure is drawn on: its letters, its style, panels, legend and small print, and its files."""

import functools
import math
import tempfile
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from fontTools import subset, ttLib
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.transforms import offset_copy

from accordion_bench.report.render import PAPERS
from accordion_bench.report.render.looks import GREY

WHOLE, LATIN = "DejaVu Sans", "DejaVu Sans Latin"
FAMILY_NAMES = (1, 4, 16)  # in a font's table of names: family, full name, typographic family


@functools.cache
def register() -> tempfile.TemporaryDirectory[str]:
    """Make LATIN known to matplotlib; returns the folder that holds it until the process ends.

    A PDF embeds the letters that it uses. To pick them from the whole font, with its 6000 glyphs and their ligatures,
    takes longer than to draw the figure, and again for every figure.
    """
    options = subset.Options(layout_features=[], notdef_outline=True)
    options.drop_tables += ["GSUB", "GPOS", "GDEF", "FFTM"]
    font = ttLib.TTFont(font_manager.findfont(WHOLE))
    cutter = subset.Subsetter(options)
    cutter.populate(unicodes=range(32, 256))
    cutter.subset(font)
    for record in list(font["name"].names):
        if record.nameID in FAMILY_NAMES:
            font["name"].setName(LATIN, record.nameID, record.platformID, record.platEncID, record.langID)
    folder = tempfile.TemporaryDirectory(prefix="accordion_bench-font-")
    path = Path(folder.name) / "latin.ttf"
    font.save(path)
    font_manager.fontManager.addfont(path)
    return folder


UNDATED = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}  # the same runs give the same file


def styled(paper: str = "two-column") -> AbstractContextManager[None]:
    """Everything drawn inside has the style of the style file, and this paper's width."""
    register()
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


WIDE = 5.0  # inches, from which panels stand side by side
PAD = 0.06  # inches at the edges
LETTER, LINE, SMALL = 0.054, 0.135, 7  # inches of a small letter and of a line of them; their size in points
SAMPLE, LONGEST = 0.55, 44  # inches of a line in a legend with the room around it; letters beside it
AXIS = 0.55  # inches of an axis below rows
UNDER_AXIS = 0.43  # inches: how far below its panel a legend stands, under numbers and name


class Sheet:
    """Panels in rows, below them the legend and small print; as wide as `figure.figsize` says.

    matplotlib's constrained layout gives everything its place; the figure's height follows from what is on it.

    Args:
        count: panels.
        height: of each row with its numbers and names, in inches; or of each panel, where they stand below each other.
        columns: panels side by side, at most.
    """

    def __init__(self, count: int, height: float | Sequence[float] = 2.4, columns: int = 2) -> None:
        self.width = mpl.rcParams["figure.figsize"][0]
        self.columns = min(columns, count) if self.width >= WIDE else 1
        rows = math.ceil(count / self.columns)
        self.heights = [height] * rows if isinstance(height, int | float) else list(height)[:rows]
        self.figure = Figure(figsize=(self.width, sum(self.heights)), layout="constrained")
        FigureCanvasAgg(self.figure)
        grid = self.figure.add_gridspec(rows, self.columns, height_ratios=self.heights)
        self.panels: list[Axes] = [self.figure.add_subplot(grid[divmod(i, self.columns)]) for i in range(count)]
        for axes in self.panels:
            axes.tick_params(labelsize=SMALL)  # also of those that come later, when the style is no longer set
        self.titles: dict[Axes, str] = {}
        self.legends: dict[Axes, Sequence[Any]] = {}

    def finish(self, note: str, handles: Sequence[Any] = ()) -> Figure:
        """Put everything in its place.

        Args:
            note: small print: what was trained, what lines, bands, markers are.
            handles: of the legend that all panels share. A panel's own are in `legends`, its title in `titles`.
        """
        above, notes = self._name_panels(), lines(note, int((self.width - 3 * PAD) / LETTER))
        columns, rows = legend_grid(handles, self.width - 2 * PAD)
        beside = len(self.panels) == 1 and self.width >= WIDE
        under = PAD + LINE * len(notes) + PAD
        foot = under if beside or not handles else under + LINE * rows + PAD
        height = sum(self.heights) + above + foot
        self.figure.set_figheight(height)
        left = PAD / self.width
        if handles and beside:
            self.figure.legend(handles=handles, loc="outside right upper", borderaxespad=0.5)
        elif handles:
            place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (left, under / height)}
            self.figure.legend(handles=handles, ncols=columns, **place).set_in_layout(False)
        small: dict[str, Any] = {"va": "bottom", "fontsize": SMALL, "color": GREY, "in_layout": False}
        self.figure.text(left, PAD / height, "\n".join(notes), **small)
        engine = self.figure.get_layout_engine()
        assert isinstance(engine, ConstrainedLayoutEngine)
        engine.set(rect=(0, foot / height, 1, 1 - foot / height))
        engine.execute(self.figure)
        self.figure.set_layout_engine("none")  # once is enough, whatever is saved
        return self.figure

    def _name_panels(self) -> float:
        """Titles and legends of single panels; returns the inches that they need."""
        cell = self.width / self.columns
        for axes, title in self.titles.items():
            axes.set_title("\n".join(lines(title, int(0.65 * cell / LETTER))))
        needed = [0.0] * len(self.heights)
        for i, axes in enumerate(self.panels):
            rows = self._legend_below(axes, cell) if axes in self.legends else 0
            titled = axes.get_title("left").count("\n") + 1 if axes in self.titles else 0
            needed[i // self.columns] = max(needed[i // self.columns], LINE * (rows + titled))
        return sum(needed)

    def _legend_below(self, axes: Axes, cell: float) -> int:
        """A panel's own legend, no wider than the panel, which is what numbers and name leave; returns its lines."""
        beside = axes.yaxis.get_tightbbox(FigureCanvasAgg(self.figure).get_renderer())
        taken = (axes.bbox.x0 - beside.x0) / self.figure.dpi if beside else 0.0
        columns, rows = legend_grid(self.legends[axes], cell - taken - 3 * PAD)
        below = offset_copy(axes.transAxes, self.figure, y=-UNDER_AXIS)
        place: dict[str, Any] = {"bbox_to_anchor": (0, 0), "bbox_transform": below}
        axes.legend(handles=self.legends[axes], loc="upper left", ncols=columns, **place)
        return rows


def lines(text: str, letters: int) -> list[str]:
    """Lines of at most so many letters; a number keeps its interval and its %."""
    kept = text.replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")
    return [line.replace("\u00a0", " ") for line in textwrap.wrap(kept, letters)]


def legend_grid(handles: Sequence[Any], width: float) -> tuple[int, int]:
    """(columns, rows of text) that a legend of this width needs, in inches; long labels get several lines."""
    if not handles:
        return 1, 0
    for handle in handles:
        handle.set_label("\n".join(lines(str(handle.get_label()), min(LONGEST, int((width - SAMPLE) / LETTER)))))
    texts = [str(handle.get_label()) for handle in handles]
    longest = max(len(line) for text in texts for line in text.splitlines())
    columns = max(1, min(len(handles), int(width / (SAMPLE + LETTER * longest))))
    each = math.ceil(len(texts) / columns)
    rows = [sum(text.count("\n") + 1 for text in texts[i : i + each]) for i in range(0, len(texts), each)]
    return columns, max(rows)
