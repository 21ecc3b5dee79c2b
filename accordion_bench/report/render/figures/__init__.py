"""Figures: what the runs of one setting, or of several, show. One room per figure; `style` is what they share."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.render import AS_PNG, Print, loaded  # noqa: F401  before whoever imports matplotlib
from accordion_bench.report.render.figures.arm_rows import breakdown, forest, to_target
from accordion_bench.report.render.figures.curves import (
    accuracy_bytes,
    accuracy_epoch,
    accuracy_modelled,
    accuracy_time,
    accuracy_wire,
    tradeoff,
)
from accordion_bench.report.render.figures.gradients import norms, variance
from accordion_bench.report.render.figures.level_grids import codebooks, level_maps, side_by_side
from accordion_bench.report.render.figures.sheet import save, styled
from accordion_bench.report.render.figures.sweeps import bits_bucket, period, workers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MANY = 10  # arms, beyond which `comparison` has rows instead of curves
OF_A_SETTING = (
    "comparison",
    "forest",
    "accuracy_epoch",
    "accuracy_bytes",
    "accuracy_wire",
    "accuracy_time",
    "accuracy_modelled",
    "time_to_target",
    "tradeoff",
    "breakdown",
    "levels",
    "norms",
    "variance",
    "codebooks",
    "bits_bucket",
    "period",
)
NAMES = (*OF_A_SETTING, "workers")


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
    return {
        "comparison": lambda: forest(arms) if len(arms) > MANY else side_by_side(arms),
        "forest": lambda: forest(arms) if 1 < len(arms) <= MANY else None,
        "accuracy_epoch": lambda: accuracy_epoch(arms),
        "accuracy_bytes": lambda: accuracy_bytes(arms),
        "accuracy_wire": lambda: accuracy_wire(arms),
        "accuracy_time": lambda: accuracy_time(arms),
        "accuracy_modelled": lambda: accuracy_modelled(arms, bandwidths),
        "time_to_target": lambda: to_target(arms),
        "tradeoff": lambda: tradeoff(arms),
        "breakdown": lambda: breakdown(arms),
        "levels": lambda: level_maps(arms),
        "norms": lambda: norms(arms),
        "variance": lambda: variance(arms),
        "codebooks": lambda: codebooks(arms),
        "bits_bucket": lambda: bits_bucket(arms),
        "period": lambda: period(arms),
    }


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
