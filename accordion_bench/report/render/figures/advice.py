"""Step time over bandwidth and over workers, modelled: who is fastest where."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from accordion_bench.advising.table import Advice, Regions, Row
from accordion_bench.advising.verdict import SPOKEN
from accordion_bench.advising.winners import BASELINES, DENSE, HALF, Stretch, as_good, stretches
from accordion_bench.options.units import human_rate
from accordion_bench.report.render.figures.marks import entry
from accordion_bench.report.render.figures.sheet import SMALL, Sheet
from accordion_bench.report.render.figures.style import save, styled
from accordion_bench.report.render.looks import BLACK, DASHES, GREY, Look, looks_of

MOST = 8  # curves
NEAR = 1.1  # times the fastest step: as close as a method must come somewhere to be drawn
FAR = 100  # times computing alone: where curves leave the panel
STRIP = 0.06  # of the panel's height: the bar that says who is fastest
HALF_LOOK = Look(BLACK, "P", (0, DASHES[1]))  # dense bf16
NARROW = 0.03  # of the axis: too narrow for a letter
NOTE = (
    "Modelled, not measured. Letters and shades: who is fastest, gains below 2 % and within noise not counted; "
    "dotted: computing alone"
)


def draw_advice(advice: Advice, out: Path) -> list[Path]:
    """Both figures as PNG and PDF; returns the PNG files."""
    with styled():
        return [
            save(over_bandwidth(advice), out / "step_over_bandwidth", ("pdf",)),
            save(over_workers(advice), out / "step_over_workers", ("pdf",)),
        ]


def over_bandwidth(advice: Advice) -> Figure:
    """Step time against the bandwidth of the (outer) link, with break-evens."""
    found = stretches(advice.by_bandwidth, _every_step(advice), from_above=True)[::-1]
    figure = _Panel(advice, advice.by_bandwidth, found, human_rate)
    figure.break_evens()
    figure.axes.set_xlabel("bandwidth of the link [bit/s, log scale]")
    figure.axes.xaxis.set_major_formatter(FuncFormatter(lambda bits, _: _short(bits)))
    return figure.finish(f"{_what(advice)}, {advice.workers} workers", "; white marks: break-even with dense bf16")


def over_workers(advice: Advice) -> Figure:
    """Step time against the number of workers on the reader's link."""
    found = stretches(advice.by_workers, _every_step(advice), from_above=False)
    figure = _Panel(advice, advice.by_workers, found, lambda count: f"{count:g} workers")
    figure.axes.set_xlabel("workers [log scale]")
    figure.axes.xaxis.set_major_locator(FixedLocator([4**i / 2 for i in range(1, 12)]))
    figure.axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:g}"))
    return figure.finish(f"{_what(advice)}, links of {human_rate(advice.by_bandwidth.here)}")


class _Panel:
    """One panel: curves, the strip of winners, the reader's own place.

    Args:
        advice: with its rows.
        regions: what is drawn.
        found: who wins where, by rising values of the axis.
        show: a place on the axis in words.
    """

    def __init__(self, advice: Advice, regions: Regions, found: Sequence[Stretch], show: Any) -> None:
        self.advice, self.regions, self.found, self.show = advice, regions, found, show
        self.rows = drawn(advice, regions, found)
        self.looks = dict(zip([row.method for row in self.rows], _looks(self.rows), strict=True))
        self.sheet = Sheet(1, height=3.0)
        self.axes: Axes = self.sheet.panels[0]
        self.high = self._highest()
        self.unit = ("s", 1.0) if self.high >= 10 else ("ms", 1e3)
        self._curves()
        self._strip()
        self._here()

    def _highest(self) -> float:
        """Seconds, up to which curves are drawn: those far above the others only press them together."""
        steps = [self.regions.steps[row.method] for row in self.rows]
        fastest = [min(at) for at in zip(*steps, strict=True)]
        return min(max(map(max, steps)), max(FAR * self.advice.compute.value, 2 * max(fastest)))

    def _curves(self) -> None:
        name, factor = self.unit
        for i, row in enumerate(self.rows):
            look, ys = self.looks[row.method], self.regions.steps[row.method]
            every = max(1, len(ys) // 5)
            marks: dict[str, Any] = {"markevery": (i * every // len(self.rows), every), "markersize": 3}
            self.axes.plot(
                self.regions.at, [factor * y for y in ys], zorder=2, **{**look.point, **marks, "linestyle": look.line}
            )
        self.axes.set_xscale("log")
        self.axes.set_yscale("log")
        low, high = factor * self.advice.compute.value, factor * self.high
        self.axes.set_ylim(low * (low / high) ** (STRIP + 0.04), high * 1.15)
        self.axes.set_xlim(min(self.regions.at), max(self.regions.at))
        self.axes.axhline(factor * self.advice.compute.value, color=GREY, linewidth=0.8, linestyle=":", zorder=1)
        self.axes.yaxis.set_major_locator(LogLocator(10, (1,) if high > 50 * low else (1, 2, 5)))
        self.axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        self.axes.yaxis.set_minor_locator(NullLocator())
        self.axes.xaxis.set_minor_locator(NullLocator())
        self.axes.set_ylabel(f"a step [{name}, log scale]")
        self.axes.grid()

    def _strip(self) -> None:
        """Who is fastest: a letter on its colour for each stretch, which is shaded."""
        for letter, stretch in zip(letters(self.found), self.found, strict=True):
            colour = GREY if stretch.method in BASELINES else self.looks[stretch.method].colour
            self.axes.axvspan(stretch.low, stretch.high, color=colour, alpha=0.07, linewidth=0, zorder=0)
            self.axes.axvspan(stretch.low, stretch.high, ymax=STRIP, color=colour, linewidth=0, zorder=3)
            place = (stretch.low * stretch.high) ** 0.5
            white: dict[str, Any] = {"color": "white", "fontsize": SMALL, "ha": "center", "va": "center"}
            if math.log(stretch.high / stretch.low) > NARROW * math.log(max(self.regions.at) / min(self.regions.at)):
                self.axes.text(place, STRIP / 2, letter, transform=self.axes.get_xaxis_transform(), zorder=4, **white)
        for stretch in self.found[1:]:
            self.axes.axvline(stretch.low, ymax=STRIP, color="white", linewidth=1.0, zorder=4)

    def _here(self) -> None:
        low, high = self.axes.get_xlim()
        left = self.regions.here > (low * high) ** 0.5
        self.axes.axvline(self.regions.here, ymin=STRIP, color=BLACK, linewidth=0.8, zorder=1.5)
        self.axes.annotate(
            f"yours: {self.show(self.regions.here)}",
            (self.regions.here, 1.0),
            xycoords=self.axes.get_xaxis_transform(),
            xytext=(-3 if left else 3, 1),
            textcoords="offset points",
            ha="right" if left else "left",
            va="bottom",
            fontsize=SMALL,
        )

    def break_evens(self) -> None:
        """Where a curve crosses that of dense bf16."""
        low, high = self.axes.get_xlim()
        for row in self.rows:
            if row.method not in BASELINES and low < row.break_even_bf16 < high and HALF in self.regions.steps:
                y = self.unit[1] * _at(self.regions, HALF, row.break_even_bf16)
                look = self.looks[row.method]
                self.axes.plot(
                    [row.break_even_bf16], [y], "o", color=look.colour, markerfacecolor="white", markersize=4, zorder=5
                )

    def finish(self, title: str, note: str = "") -> Figure:
        where: dict[str, list[str]] = {}
        for letter, stretch in zip(letters(self.found), self.found, strict=True):
            where.setdefault(stretch.method, []).append(letter)
        named = []
        for row in self.rows:
            label = SPOKEN.get(row.method, row.method)
            if row.local and not row.every_local_step:
                label += f", every {row.period} steps" if "H " not in label else ""
                label += " (local steps)"
            if row.method in where:
                label += f" ({', '.join(where[row.method])})"
            named.append(entry(self.looks[row.method], label))
        return self.sheet.finish(f"{title}. {NOTE}{note}.", named)


def letters(found: Sequence[Stretch]) -> list[str]:
    """A, B, C by stretch; two stretches of one winner have one letter."""
    names = list(dict.fromkeys(stretch.method for stretch in found))
    return [chr(ord("A") + names.index(stretch.method)) for stretch in found]


def drawn(advice: Advice, regions: Regions, found: Sequence[Stretch]) -> list[Row]:
    """Dense, who wins somewhere, the best local method, then those that come near; at most eight."""
    winners = {stretch.method for stretch in found}
    local = [row for row in advice.rows if row.local]
    best_local = as_good(local)[0].method if local else ""
    first = [row for row in advice.rows if row.method in (*BASELINES, *winners, best_local)]
    distance = {row.method: _distance(advice, regions, row) for row in _every_step(advice) if row not in first}
    near = sorted((name for name in distance if distance[name] < NEAR), key=distance.__getitem__)
    chosen = {row.method for row in first} | set(near[: max(0, MOST - len(first))])
    return sorted((row for row in advice.rows if row.method in chosen), key=lambda row: row.method not in BASELINES)


def _distance(advice: Advice, regions: Regions, row: Row) -> float:
    """Times the fastest step, where that is least, of the places at which dense is not near itself."""
    steps = {other.method: regions.steps[other.method] for other in _every_step(advice)}
    best = [min(at) for at in zip(*steps.values(), strict=True)]
    lost = [i for i in range(len(best)) if min(steps[name][i] for name in BASELINES if name in steps) > NEAR * best[i]]
    return min((steps[row.method][i] / best[i] for i in lost), default=math.inf)


def _looks(rows: Sequence[Row]) -> list[Look]:
    """As in every other figure; dense bf16 is black, too."""
    found = looks_of([(row.method, row.method, row.method == DENSE) for row in rows])
    return [HALF_LOOK if row.method == HALF else look for row, look in zip(rows, found, strict=True)]


def _every_step(advice: Advice) -> list[Row]:
    return [row for row in advice.rows if not row.local]


def _what(advice: Advice) -> str:
    return f"A step of {advice.model} on {advice.device}"


def _at(regions: Regions, method: str, place: float) -> float:
    """A curve between its points."""
    import numpy as np

    ys = np.log(regions.steps[method])
    return float(np.exp(np.interp(np.log(place), np.log(regions.at), ys)))


def _short(bits: float) -> str:
    """`100M`, `1G`."""
    return human_rate(bits).replace("bit/s", "").replace(" ", "")
