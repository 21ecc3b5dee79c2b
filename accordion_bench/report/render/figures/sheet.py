"""Shared parts of all figures: sheet with style, legend and footnote; axes, intervals, curves and markers of arms."""

import functools
import math
import tempfile
import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from fontTools import subset, ttLib
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import offset_copy
from numpy.typing import NDArray

from accordion_bench.options.units import human_bytes
from accordion_bench.report import PAPERS
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.intervals import apart, half_width, show_value
from accordion_bench.report.render import GREY, ArmLook
from accordion_bench.runs.metrics import LOSSES, Metric, metric

WHOLE, LATIN = "DejaVu Sans", "DejaVu Sans Latin"
FAMILY_NAMES = (1, 4, 16)  # record numbers in a font's name table: family, full name, typographic family


@functools.cache
def register() -> tempfile.TemporaryDirectory[str]:
    """Register the font LATIN with matplotlib; return the folder that contains it until the process ends.

    A PDF embeds the glyphs that it uses. Selecting them from the full font, with its 6000 glyphs and ligatures, takes
    longer than drawing the figure, and is repeated for every figure.
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


UNDATED = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}  # reproducible files: no dates


def styled(paper: str = "two-column") -> AbstractContextManager[None]:
    """Context with the style of the style file and the width of the given paper."""
    register()
    own = mpl.rc_params_from_file(Path(__file__).with_name("paper.mplstyle"), use_default_template=False)
    return mpl.rc_context({**own, "figure.figsize": (PAPERS[paper], own["figure.figsize"][1])})


def save(figure: Figure, stem: Path, formats: tuple[str, ...] = ("png",)) -> Path:
    """Write the figure in `formats` of FIGURES, and always as PNG, to `stem` with a suffix; return the PNG file."""
    png = stem.with_name(f"{stem.name}.png")
    FigureCanvasAgg(figure).print_png(png)  # savefig would draw it twice, repeating the layout
    for ending in sorted({*formats} - {"png"}):
        figure.savefig(stem.with_name(f"{stem.name}.{ending}"), metadata=UNDATED[ending])
    return png


WIDE = 5.0  # least width in inches for panels side by side
PAD = 0.06  # inches at the edges
LETTER, LINE, SMALL = 0.054, 0.135, 7  # inches of a small character and of a line of them; their size in points
SAMPLE, LONGEST = 0.55, 44  # inches of a line sample in a legend with its margins; most characters of a label line
AXIS = 0.55  # height in inches of an axis below rows
UNDER_AXIS = 0.43  # inches between a panel and its legend, for tick labels and axis label


class Sheet:
    """Panels in rows, with legend and footnote below them; its width is that of `figure.figsize`.

    matplotlib's constrained layout places the panels; the figure's height follows from the content.

    Args:
        count: number of panels.
        height: height in inches of each row, including tick and axis labels; or one per panel if panels are stacked.
        columns: most panels side by side.
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
            axes.tick_params(labelsize=SMALL)  # also for ticks that are created later, outside the style's context
        self.titles: dict[Axes, str] = {}
        self.legends: dict[Axes, Sequence[Any]] = {}

    def finish(self, note: str, handles: Sequence[Any] = ()) -> Figure:
        """Lay out the sheet and return the figure.

        Args:
            note: footnote: what was trained, and the meaning of lines, bands and markers.
            handles: entries of the legend shared by all panels. A panel's own legend is in `legends`, its title in
                `titles`.
        """
        above, note = self._name_panels(), wrapped(note, int((self.width - 3 * PAD) / LETTER))
        columns, rows = legend_grid(handles, self.width - 2 * PAD)
        beside = len(self.panels) == 1 and self.width >= WIDE
        under = PAD + LINE * (note.count("\n") + 1) + PAD
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
        self.figure.text(left, PAD / height, note, **small)
        engine = self.figure.get_layout_engine()
        assert isinstance(engine, ConstrainedLayoutEngine)
        engine.set(rect=(0, foot / height, 1, 1 - foot / height))
        engine.execute(self.figure)
        self.figure.set_layout_engine("none")  # keep this layout for all saved formats
        return self.figure

    def _name_panels(self) -> float:
        """Add titles and legends of single panels; return their height in inches."""
        cell = self.width / self.columns
        for axes, title in self.titles.items():
            axes.set_title(wrapped(title, int(0.65 * cell / LETTER)))
        needed = [0.0] * len(self.heights)
        for i, axes in enumerate(self.panels):
            rows = self._legend_below(axes, cell) if axes in self.legends else 0
            titled = axes.get_title("left").count("\n") + 1 if axes in self.titles else 0
            needed[i // self.columns] = max(needed[i // self.columns], LINE * (rows + titled))
        return sum(needed)

    def _legend_below(self, axes: Axes, cell: float) -> int:
        """Add a panel's own legend, no wider than the panel without its labels; return its number of lines."""
        beside = axes.yaxis.get_tightbbox(FigureCanvasAgg(self.figure).get_renderer())
        taken = (axes.bbox.x0 - beside.x0) / self.figure.dpi if beside else 0.0
        columns, rows = legend_grid(self.legends[axes], cell - taken - 3 * PAD)
        below = offset_copy(axes.transAxes, self.figure, y=-UNDER_AXIS)
        place: dict[str, Any] = {"bbox_to_anchor": (0, 0), "bbox_transform": below}
        axes.legend(handles=self.legends[axes], loc="upper left", ncols=columns, **place)
        return rows


def wrapped(text: str, letters: int) -> str:
    """Wrap a text to lines of at most `letters` characters; a number keeps its interval and its %."""
    kept = text.replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")
    return textwrap.fill(kept, letters).replace("\u00a0", " ")


def legend_grid(handles: Sequence[Any], width: float) -> tuple[int, int]:
    """Return (columns, rows of text) of a legend of this width in inches; long labels are wrapped in place."""
    if not handles:
        return 1, 0
    for handle in handles:
        handle.set_label(wrapped(str(handle.get_label()), min(LONGEST, int((width - SAMPLE) / LETTER))))
    texts = [str(handle.get_label()) for handle in handles]
    longest = max(len(line) for text in texts for line in text.splitlines())
    columns = max(1, min(len(handles), int(width / (SAMPLE + LETTER * longest))))
    each = math.ceil(len(texts) / columns)
    rows = [sum(text.count("\n") + 1 for text in texts[i : i + each]) for i in range(0, len(texts), each)]
    return columns, max(rows)


# ---- plotted numbers and limits of axes


Array = NDArray[np.float64]
Place = tuple[float, float]  # x and y


def column(arm: Arm, name: str) -> Array:
    """Return a column of metrics.jsonl [seeds, epochs], up to the shortest run's end; NaN where a row lacks it."""
    epochs = min(len(run.rows) for run in arm.runs)
    return np.array([[row.get(name) for row in run.rows[:epochs]] for run in arm.runs], dtype=np.float64)


def scores(arm: Arm) -> Array:
    """Return the metric [seeds, epochs] as displayed: shares in percent."""
    return metric_of([arm]).scaled(1.0) * column(arm, arm.metric)


def ends(arm: Arm) -> list[float]:
    """Return the metric of each seed after the last epoch, as displayed."""
    return [metric_of([arm]).scaled(run.rows[-1][arm.metric]) for run in arm.runs]


def end(arm: Arm) -> tuple[float, float | None]:
    """Return the mean of `ends` and the half width of its interval."""
    return float(np.mean(ends(arm))), interval(ends(arm))


def metric_of(arms: Sequence[Arm]) -> Metric:
    """Return the metric of the arms of one setting."""
    return metric(arms[0].metric)


def interval(values: Sequence[float]) -> float | None:
    """Return the half width of Student's 95 % t-interval, None below two seeds."""
    return half_width(values) if len(values) > 1 else None


def seeds(arms: Sequence[Arm]) -> str:
    """Return `n = 3 (seeds 0, 1, 2)`; `n = 3` if seeds are unknown; with single runs, state that nothing is ranked."""
    numbers = sorted({seed for arm in arms for seed in arm.seeds if seed is not None})
    text = f"n = {'/'.join(map(str, sorted({arm.n for arm in arms})))}"
    if numbers:
        text += f" ({'seeds' if len(numbers) > 1 else 'seed'} {', '.join(map(str, numbers))})"
    return text if several(arms) else f"{text}: one run of each arm, so nothing is ranked"


def several(arms: Sequence[Arm]) -> bool:
    """Whether any arm has several seeds, so intervals can be drawn."""
    return max(arm.n for arm in arms) > 1


def shown_end(arm: Arm) -> str:
    """Format the metric after the last epoch: `91.00 ± 2.48 %`."""
    half = half_width(arm.values("metric"))
    return show_value(metric_of([arm]), arm.mean("metric"), half)


WORST = 20  # points below the best arm; worse arms are drawn at the edge, with their number
TIMES_WORST = 2.0  # the same as a factor, for metrics without an upper bound
POINTS, IMAGES = 5, 10  # least span of an axis of accuracy, in points and in test images; the larger counts
SHARE = 0.05  # least span of other axes, relative to the best value
HUNDRED, MOST = 100.0, 100.5  # percent: upper bound of accuracy, and end of its axis, with room for the last marker


def least_span(arms: Sequence[Arm]) -> float:
    """Return the least span of the metric's axis, as displayed: 5 points and 10 test images of accuracy."""
    of = metric_of(arms)
    if not of.percent:
        return SHARE * abs(best_of(arms))
    sizes = [size for arm in arms if isinstance(size := arm.runs[0].summary.get("test_size"), int) and size > 0]
    return max(POINTS, 100 * IMAGES / min(sizes)) if sizes else POINTS


def best_of(arms: Sequence[Arm]) -> float:
    """Return the best mean after the last epoch, as displayed."""
    means = [value for arm in arms if math.isfinite(value := end(arm)[0])] or [0.0]
    return max(means) if metric_of(arms).higher_is_better else min(means)


def floor(of: Metric, best: float) -> float:
    """Return the worst value that is drawn at its true position, given the best one."""
    if not of.higher_is_better:
        return TIMES_WORST * best
    return best - WORST if of.percent else -math.inf


def end_limits(arms: Sequence[Arm]) -> tuple[float, float]:
    """Return (low, high) of an axis of final values: all means but those far behind, with their intervals."""
    means = [(value, half or 0.0) for value, half in map(end, arms)]
    return limits_of_means(means, metric_of(arms), least_span(arms), best_of(arms))


def limits_of_means(means: Sequence[tuple[float, float]], of: Metric, least: float, best: float) -> tuple[float, float]:
    """Return (low, high) of an axis of means, given as (mean, half width of its interval), in displayed numbers.

    Intervals may extend the axis by at most the span of the means; beyond that they are cut. The span is at least
    `least`; `best` is the best of the means.
    """
    worst = floor(of, best)
    near = [(mean, half) for mean, half in means if math.isfinite(mean) and not of.better(worst, mean)] or [(0.0, 0.0)]
    low, high = min(mean for mean, _ in near), max(mean for mean, _ in near)
    room = max(high - low, least)
    lowest, highest = min(mean - half for mean, half in near), max(mean + half for mean, half in near)
    return spanned(max(low - room, lowest), min(high + room, highest), of, least)


def curve_limits(arms: Sequence[Arm]) -> tuple[float, float]:
    """Return (low, high) of an axis of learning curves: all epochs, or the late ones if intervals separate arms."""
    of = metric_of(arms)
    sign = 1 if of.higher_is_better else -1
    curves = [sign * mean[np.isfinite(mean)] for mean in (scores(arm).mean(axis=0) for arm in arms)]
    curves = [curve for curve in curves if len(curve)] or [np.zeros(1)]
    best = max(curve[-1] for curve in curves)
    near = [curve for curve in curves if curve[-1] >= sign * floor(of, sign * best)] or curves
    early = (0.25 if of.higher_is_better else 0.5) if apart(arms) else 0.0  # perplexities fall from thousands
    low = min(min(np.quantile(curve, early), curve[-1]) for curve in near)
    high = max(float(curve.max()) for curve in near)
    low_end, high_end = end_limits(arms)
    bottom, top = sorted((sign * low, sign * high))
    return spanned(min(bottom, low_end), max(top, high_end), of, least_span(arms))


def spanned(low: float, high: float, of: Metric, least: float) -> tuple[float, float]:
    """Return limits with a margin and a least span, within the metric's range."""
    more = max(0.16 * (high - low), least - (high - low)) / 2
    low, high = low - more, high + more
    if of.percent and high > MOST:
        low, high = min(low, MOST - least), MOST
    return (max(low, 0.0), high) if of.percent or low + more >= 0 else (low, high)


LARGEST, SMALLEST = 8.0, 5.0  # sizes of markers in points
EPOCHS = "training [epochs]"
SENT = "sent per worker [bytes, log scale]"  # the tables' name of the bytes sent by a worker's own link
OUTSIDE = {"x": "<>", "y": "v^"}  # arrow markers at the low and the high edge


def entry(look: ArmLook, label: str, line: bool = True) -> Line2D:
    """Return the legend entry of an arm."""
    point = look.point if not line else {**look.point, "linestyle": look.line}
    return Line2D([], [], label=label, **point)


def interval_bar(axes: Axes, place: Place, half: float | None, colour: str, across: bool = False) -> None:
    """Draw an interval from y - half to y + half, or from x - half to x + half; nothing without an interval.

    The axes' limits must be final: parts outside them, or above 100 percent, are cut and marked with an arrow. Plain
    lines are used because matplotlib's error bars take ten times as long.
    """
    at, other, (low, high), arrows, cap = _along(axes, place, across)
    bottom, top = sorted(axes.get_ylim())
    if half is None or not low <= at <= high or (across and not bottom <= other <= top):
        return  # of an arm outside, arrows would be drawn outside the figure
    ends = at - half, at + half
    seen = max(ends[0], low), min(ends[1], HUNDRED if high == MOST else high)
    options: dict[str, Any] = {"color": colour, "linewidth": 0.9, "zorder": 3.5, "gid": "interval"}
    axes.plot(*_placed(seen, (other, other), across), **options)
    for end, edge, arrow in zip(ends, seen, arrows, strict=True):
        mark = {"marker": cap} if end == edge else {"marker": arrow, "clip_on": False, "gid": "cut"}
        axes.plot(*_placed((edge,), (other,), across), **{**options, "markersize": 4, **mark})


def curve(axes: Axes, xs: Array, ys: Array, look: ArmLook, zorder: float = 2) -> None:
    """Draw an arm's mean over the seeds at xs [places], and a band of the range of ys [seeds, places]."""
    axes.plot(xs, ys.mean(axis=0), color=look.colour, linestyle=look.line, zorder=zorder, gid="curve")
    if len(ys) > 1:
        axes.fill_between(xs, ys.min(axis=0), ys.max(axis=0), color=look.colour, alpha=0.13, linewidth=0, zorder=1)


def dense_line(axes: Axes, arm: Arm, width: float, across: bool = False) -> None:
    """Draw a line across the panel at a dense arm's metric after the last epoch, and a band of its interval."""
    value, half = end(arm)
    line, band = (axes.axvline, axes.axvspan) if across else (axes.axhline, axes.axhspan)
    line(value, color="black", linewidth=width, zorder=1)
    band(value - (half or 0.0), value + (half or 0.0), color="black", alpha=0.07, linewidth=0, zorder=0)


def end_marker(
    axes: Axes, place: Place, look: ArmLook, number: str, across: bool = False, size: float = SMALLEST
) -> None:
    """Draw an arm's marker; outside the axes' limits, which must be final, an arrow at the edge with its number."""
    at, other, (low, high), arrows, _ = _along(axes, place, across)
    if not math.isfinite(at):
        return
    if low <= at <= high:
        axes.plot([place[0]], [place[1]], zorder=5, gid="end", markersize=size, **look.point)
        return
    edge, arrow = (low, arrows[0]) if at < low else (high, arrows[1])
    ((place_x,), (place_y,)) = _placed((edge,), (other,), across)
    options = {**look.point, "marker": arrow, "clip_on": False, "gid": "outside"}
    axes.plot([place_x], [place_y], zorder=5, **options)
    inwards = (6 if at < low else -6) if across else 6
    aligned: dict[str, Any] = {"ha": "right" if across and at > high else "left", "va": "center"}
    near = 0 if across else _numbers_near(axes, (place_x, place_y), number)
    lift = 0.0 if across else 72 * LINE * (near + 0.6 if at < low else -near)  # the lower edge has a line
    aligned |= {"textcoords": "offset points", "fontsize": SMALL, "gid": "number outside"}
    axes.annotate(number, (place_x, place_y), (inwards, lift), **aligned)


def _numbers_near(axes: Axes, place: Place, number: str) -> int:
    """Return how many numbers of other arms at this edge would be overprinted by this one."""
    letter, (x, y) = LETTER * mpl.rcParams["figure.dpi"], axes.transData.transform(place)
    others = [text for text in axes.texts if isinstance(text, Annotation) and text.get_gid() == "number outside"]
    wide = letter * max([len(number), *(len(text.get_text()) for text in others)])
    places = [axes.transData.transform(text.xy) for text in others]
    return sum(bool(abs(other_x - x) < wide and abs(other_y - y) < 1) for other_x, other_y in places)


def _along(axes: Axes, place: Place, across: bool) -> tuple[float, float, Place, str, str]:
    """Return (position on the metric's axis, position on the other axis, limits, arrows, cap of an interval)."""
    (x, y), (low, high) = place, sorted(axes.get_xlim() if across else axes.get_ylim())
    return (x, y, (low, high), OUTSIDE["x"], "|") if across else (y, x, (low, high), OUTSIDE["y"], "_")


def _placed(along: Sequence[float], other: Sequence[float], across: bool) -> tuple[Sequence[float], Sequence[float]]:
    return (along, other) if across else (other, along)


MARGIN = 1.3  # margin of a logarithmic axis beyond the extreme values, as a factor


def epochs_axis(axes: Axes) -> None:
    """Label an axis of epochs, with integer ticks."""
    axes.set_xlabel(EPOCHS)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))


def bytes_axis(axes: Axes, low: float, high: float) -> None:
    """Set up a logarithmic axis of bytes from the fewest to the most, with ticks suited to its range."""
    _logarithmic(axes.xaxis, axes.set_xscale, low, high, lambda value, _: human_bytes(value))
    axes.set_xlim(low / MARGIN, high * MARGIN)


def log_axis(axes: Axes, low: float, high: float, margin: float = MARGIN) -> None:
    """Set up a logarithmic vertical axis from the lowest to the highest value, with tick labels in one notation."""
    plain = low >= 1e-3 and high < 1e5
    _logarithmic(axes.yaxis, axes.set_yscale, low, high, lambda value, _: f"{value:g}" if plain else _powers(value))
    axes.set_ylim(low / margin, high * margin)


def _powers(value: float) -> str:
    """`1e-7`, `2e3`."""
    digits, _, power = f"{value:.0e}".partition("e")
    return f"{digits}e{int(power)}"


def _logarithmic(axis: Any, set_scale: Any, low: float, high: float, number: Any) -> None:
    set_scale("log")
    close = high < 4 * low  # range too small for ticks at 1, 2 and 5 times powers of ten
    axis.set_major_locator(MaxNLocator(4) if close else LogLocator(10, (1,) if high > 50 * low else (1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(number))
    axis.set_minor_locator(NullLocator())


def metric_label(arms: Sequence[Arm]) -> str:
    """Return the label of the metric's axis: `test accuracy [%]`, `validation bits per byte [-], lower is better`."""
    of = metric_of(arms)
    split = "validation" if (arms[0].config.get("dataset") or {}).get("metric_split") == "valid" else "test"
    name = of.words if of.name in LOSSES else f"{split} {of.words}"
    return f"{name} [{of.unit or '-'}]" + ("" if of.higher_is_better else ", lower is better")


def name_height(axes: Axes, arms: Sequence[Arm]) -> None:
    """Label the metric's axis, in two lines because one may exceed the panel's height."""
    axes.set_ylabel(metric_label(arms).replace("], ", "],\n"))
