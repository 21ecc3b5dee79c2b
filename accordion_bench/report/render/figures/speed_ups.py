"""Figures of advice: modelled speed-up over dense bf16 by bandwidth and by workers, with the fastest method."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from accordion_bench.advising.advice import Advice, AdviceRow, Regions
from accordion_bench.advising.predict import GAIN
from accordion_bench.advising.verdict import BASELINES, DENSE, HALF, SPOKEN, Stretch, as_good, stretches
from accordion_bench.options.units import human_rate
from accordion_bench.report.render import BLACK, DASHES, GREY, ArmLook, looks_of
from accordion_bench.report.render.figures.sheet import SMALL, Sheet, entry, save, styled

MOST = 8  # most curves
NEAR = 1.1  # a method is drawn if its step takes at most this times the fastest one somewhere
LOW, HIGH = 0.5, 2.0  # limits of the panel, in times as fast as dense bf16
ABOVE = 1.15  # upper limit relative to the fastest method at the user's own point, so that it is visible
STRIP = 0.06  # height of the bar of fastest methods, relative to the panel
HALF_LOOK = ArmLook(BLACK, "P", (0, DASHES[1]))  # dense bf16
THIN = 0.7  # line width in points of methods that are not ranked
NARROW = 0.03  # share of the axis that is too narrow for a letter
NOTE = (
    f"Modelled, not measured. Letters and shades: who is fastest, gains below {100 * GAIN:g} % (grey band) and within "
    "noise not counted; dotted: no communication at all"
)
UNRANKED = "thin: local methods, which are not ranked, because they change the algorithm"


def draw_advice(advice: Advice, out: Path) -> list[Path]:
    """Write both figures as PNG and PDF; return the PNG files."""
    with styled():
        return [
            save(over_bandwidth(advice), out / "speed_up_over_bandwidth", ("pdf",)),
            save(over_workers(advice), out / "speed_up_over_workers", ("pdf",)),
        ]


def over_bandwidth(advice: Advice) -> Figure:
    """Draw the speed-up against the bandwidth of the (outer) link, with break-evens."""
    found = stretches(advice.by_bandwidth, _every_step(advice), from_above=True)[::-1]
    figure = _Panel(advice, advice.by_bandwidth, found, human_rate)
    figure.break_evens()
    figure.axes.set_xlabel("bandwidth of the link [bit/s, log scale]")
    figure.axes.xaxis.set_major_formatter(FuncFormatter(lambda bits, _: _short(bits)))
    return figure.finish(f"{_what(advice)}, {advice.workers} workers", "; white marks: break-even with dense bf16")


def over_workers(advice: Advice) -> Figure:
    """Draw the speed-up against the number of workers on the user's link."""
    found = stretches(advice.by_workers, _every_step(advice), from_above=False)
    figure = _Panel(advice, advice.by_workers, found, lambda count: f"{count:g} workers")
    figure.axes.set_xlabel("workers [log scale]")
    figure.axes.xaxis.set_major_locator(FixedLocator([4**i / 2 for i in range(1, 12)]))
    figure.axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:g}"))
    return figure.finish(f"{_what(advice)}, links of {human_rate(advice.by_bandwidth.here)}")


class _Panel:
    """One panel with curves, the strip of fastest methods, and the user's own point.

    Args:
        advice: the advice with its rows.
        regions: modelled times along the axis.
        found: fastest method by stretch, in ascending order of the axis.
        show: function that formats a point of the axis.
    """

    def __init__(self, advice: Advice, regions: Regions, found: Sequence[Stretch], show: Any) -> None:
        self.advice, self.regions, self.show = advice, regions, show
        self.found = [stretch._replace(low=_edge(regions, stretch.low)) for stretch in found]
        self.found = [a._replace(high=b.low) for a, b in itertools.pairwise(self.found)] + self.found[-1:]
        self.rows = drawn(advice, regions, found)
        self.looks = dict(zip([row.method for row in self.rows], _looks(self.rows), strict=True))
        self.sheet = Sheet(1, height=3.0)
        self.axes: Axes = self.sheet.panels[0]
        self._curves()
        self._strip()
        self._here()

    def _curves(self) -> None:
        for i, row in enumerate(self.rows):
            look, ys = self.looks[row.method], speed_ups(self.regions, row.method)
            every = max(1, len(ys) // 5)
            marks: dict[str, Any] = {"markevery": (i * every // len(self.rows), every), "markersize": 3}
            if row.local:
                marks = {"marker": "", "linewidth": THIN}
            self.axes.plot(self.regions.at, ys, zorder=2, **{**look.point, "linestyle": look.line, **marks})
        half = self.regions.steps[HALF]
        alone = [seconds / self.advice.compute.value for seconds in half]
        self.axes.plot(self.regions.at, alone, color=GREY, linewidth=0.8, linestyle=":", zorder=1)
        self.axes.axhspan(1 / (1 + GAIN), 1 + GAIN, color=GREY, alpha=0.25, linewidth=0, zorder=0.5)
        self.axes.set_xscale("log")
        high = max(HIGH, ABOVE * self._fastest_here())
        self.axes.set_ylim(LOW - (high - LOW) * (STRIP + 0.02), high)  # curves that leave the panel end above the strip
        self.axes.set_xlim(min(self.regions.at), max(self.regions.at))
        between = _between_ticks(high)
        ticks = [between * count for count in range(math.ceil(LOW / between), math.floor(high / between) + 1)]
        self.axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        self.axes.yaxis.set_minor_locator(NullLocator())
        self.axes.xaxis.set_minor_locator(NullLocator())
        self.axes.set_ylabel("times as fast as dense bf16")
        self.axes.grid()

    def _fastest_here(self) -> float:
        """Return the largest speed-up over dense bf16 of the ranked methods at the user's own point."""
        return max(row.over_bf16.value for row in _every_step(self.advice))

    def _strip(self) -> None:
        """Draw the fastest method of each stretch: a letter on its colour, above a shaded background."""
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
        """Mark where a curve crosses that of dense bf16."""
        low, high = self.axes.get_xlim()
        for row in self.rows:
            if row.method not in BASELINES and low < row.break_even_bf16 < high and HALF in self.regions.steps:
                look = self.looks[row.method]
                white: dict[str, Any] = {"markerfacecolor": "white", "markersize": 4, "zorder": 5}
                self.axes.plot([row.break_even_bf16], [1.0], "o", color=look.colour, **white)

    def finish(self, title: str, note: str = "") -> Figure:
        where: dict[str, list[str]] = {}
        for letter, stretch in zip(letters(self.found), self.found, strict=True):
            where.setdefault(stretch.method, []).append(letter)
        named = []
        for row in self.rows:
            label = SPOKEN.get(row.method, row.method)
            if row.local and not row.every_local_step:
                label += f", every {row.period} steps" if "H " not in label else ""
                label += " (not ranked)"
            if row.method in where:
                label += f" ({', '.join(where[row.method])})"
            named.append(entry(self.looks[row.method], label))
            if row.local:
                named[-1].set(marker="", linewidth=THIN)
        if any(row.local for row in self.rows):
            note += f"; {UNRANKED}"
        return self.sheet.finish(f"{title}. {NOTE}{note}.", named)


def speed_ups(regions: Regions, method: str) -> list[float]:
    """Return the speed-up over dense bf16 at each point of the axis."""
    return [half / own for half, own in zip(regions.steps[HALF], regions.steps[method], strict=True)]


def _edge(regions: Regions, low: float) -> float:
    """Return the start of a stretch as drawn: halfway between two points if it starts at a point of the axis."""
    number = regions.at.index(low) if low in regions.at else 0
    return (regions.at[number - 1] * low) ** 0.5 if number else low


def _between_ticks(high: float) -> float:
    """Return the distance of ticks: 0.25, or the smallest larger step that gives at most ten ticks."""
    return next(step for step in (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0, 1000.0) if (high - LOW) / step <= 10)


def letters(found: Sequence[Stretch]) -> list[str]:
    """Return A, B, C by stretch; stretches of the same method share a letter."""
    names = list(dict.fromkeys(stretch.method for stretch in found))
    return [chr(ord("A") + names.index(stretch.method)) for stretch in found]


def drawn(advice: Advice, regions: Regions, found: Sequence[Stretch]) -> list[AdviceRow]:
    """Select at most eight methods: dense, winners, the best local method, then those that come near."""
    winners = {stretch.method for stretch in found}
    local = [row for row in advice.rows if row.local]
    best_local = as_good(local)[0].method if local else ""
    first = [row for row in advice.rows if row.method in (*BASELINES, *winners, best_local)]
    distance = {row.method: _distance(advice, regions, row) for row in _every_step(advice) if row not in first}
    near = sorted((name for name in distance if distance[name] < NEAR), key=distance.__getitem__)
    chosen = {row.method for row in first} | set(near[: max(0, MOST - len(first))])
    return sorted((row for row in advice.rows if row.method in chosen), key=lambda row: row.method not in BASELINES)


def _distance(advice: Advice, regions: Regions, row: AdviceRow) -> float:
    """Return the smallest ratio of the step to the fastest one, over points at which dense is not near the fastest."""
    steps = {other.method: regions.steps[other.method] for other in _every_step(advice)}
    best = [min(at) for at in zip(*steps.values(), strict=True)]
    lost = [i for i in range(len(best)) if min(steps[name][i] for name in BASELINES if name in steps) > NEAR * best[i]]
    return min((steps[row.method][i] / best[i] for i in lost), default=math.inf)


def _looks(rows: Sequence[AdviceRow]) -> list[ArmLook]:
    """Return the looks of all other figures; dense bf16 is black, too."""
    found = looks_of([(row.method, row.method, row.method == DENSE) for row in rows])
    return [HALF_LOOK if row.method == HALF else look for row, look in zip(rows, found, strict=True)]


def _every_step(advice: Advice) -> list[AdviceRow]:
    return [row for row in advice.rows if not row.local]


def _what(advice: Advice) -> str:
    return f"A step of {advice.model} on {advice.on}"


def _short(bits: float) -> str:
    """Return `100M`, `1G`."""
    return human_rate(bits).replace("bit/s", "").replace(" ", "")
