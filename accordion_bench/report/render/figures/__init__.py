"""Figures: what the runs of one setting, or of several, show. Each kind is declared once, in `KINDS`."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.render import AS_PNG, Print, loaded  # noqa: F401  before whoever imports matplotlib
from accordion_bench.report.render.figures.arm_rows import breakdown, forest, to_target
from accordion_bench.report.render.figures.curves import (
    accuracy_bytes,
    accuracy_epoch,
    accuracy_modelled,
    accuracy_simulated,
    accuracy_time,
    accuracy_wire,
    consensus_distance,
    tradeoff,
)
from accordion_bench.report.render.figures.gradients import norms, variance
from accordion_bench.report.render.figures.level_grids import codebooks, level_maps, side_by_side
from accordion_bench.report.render.figures.sheet import save, styled
from accordion_bench.report.render.figures.sweeps import bits_bucket, period, workers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MANY = 10  # arms, beyond which `comparison` has rows instead of curves


class FigureKind(NamedTuple):
    """One figure of a setting.

    draw: from its arms and the bandwidths of links, bit/s; None where it would say nothing.
    title: what the page calls its picture; "" where the page draws it itself.
    """

    draw: Callable[[Sequence[Arm], Sequence[float]], "Figure | None"]
    title: str = ""


KINDS = {
    "comparison": FigureKind(lambda arms, _: forest(arms) if len(arms) > MANY else side_by_side(arms)),
    "forest": FigureKind(lambda arms, _: forest(arms) if 1 < len(arms) <= MANY else None),
    "accuracy_epoch": FigureKind(lambda arms, _: accuracy_epoch(arms)),
    "accuracy_bytes": FigureKind(lambda arms, _: accuracy_bytes(arms)),
    "accuracy_wire": FigureKind(lambda arms, _: accuracy_wire(arms)),
    "accuracy_time": FigureKind(lambda arms, _: accuracy_time(arms)),
    "accuracy_modelled": FigureKind(accuracy_modelled),
    "accuracy_simulated": FigureKind(lambda arms, _: accuracy_simulated(arms), "Against simulated time"),
    "consensus_distance": FigureKind(
        lambda arms, _: consensus_distance(arms), "Distance of the workers from their mean"
    ),
    "time_to_target": FigureKind(lambda arms, _: to_target(arms)),
    "tradeoff": FigureKind(lambda arms, _: tradeoff(arms)),
    "breakdown": FigureKind(lambda arms, _: breakdown(arms)),
    "levels": FigureKind(lambda arms, _: level_maps(arms)),
    "norms": FigureKind(lambda arms, _: norms(arms), "Norms of the summed gradients"),
    "variance": FigureKind(lambda arms, _: variance(arms), "Compression error"),
    "codebooks": FigureKind(lambda arms, _: codebooks(arms), "Quantisation levels, epoch by epoch"),
    "bits_bucket": FigureKind(lambda arms, _: bits_bucket(arms), "Against bits and bucket size"),
    "period": FigureKind(lambda arms, _: period(arms), "Against the period"),
}
OF_A_SETTING = tuple(KINDS)
NAMES = (*OF_A_SETTING, "workers")
INTERACTIVE = frozenset(name for name, kind in KINDS.items() if not kind.title)  # which the page draws itself


def title(png: Path) -> str:
    """What the page calls the picture in a file, by the name of the file."""
    name = png.stem.partition("-")[0]
    return KINDS[name].title if name in KINDS else "Against the number of workers"


def draw_all(arms: Sequence[Arm], out: Path, suffix: str = "") -> list[Path]:
    """Write every figure that the arms of one setting allow, as PNG; returns the files."""
    drawn = (draw_one(name, arms, out, suffix) for name in OF_A_SETTING)
    return [png for png in drawn if png is not None]


def draw_one(
    name: str,
    arms: Sequence[Arm],
    out: Path,
    suffix: str = "",
    printed: Print = AS_PNG,
) -> Path | None:
    """Write one figure of one setting; returns the PNG file, or None where the figure would say nothing.

    Args:
        name: one of OF_A_SETTING.
        arms: of the setting.
        out: folder.
        suffix: of the file names.
        printed: how.
    """
    with styled(printed.paper):
        figure = rooms(arms, printed.bandwidths)[name]()
        return None if figure is None else save(figure, out / f"{name}{suffix}", printed.formats)


def rooms(arms: Sequence[Arm], bandwidths: Sequence[float]) -> dict[str, Callable[[], "Figure | None"]]:
    """What draws each figure of one setting."""
    return {name: functools.partial(kind.draw, arms, bandwidths) for name, kind in KINDS.items()}


def draw_across(settings: Sequence[Sequence[Arm]], out: Path, printed: Print = AS_PNG) -> list[Path]:
    """Write the figures that compare settings; returns the PNG files.

    Args:
        settings: the arms of each setting.
        out: folder.
        printed: how.
    """
    with styled(printed.paper):
        figure = workers(settings)
        return [] if figure is None else [save(figure, out / "workers", printed.formats)]
