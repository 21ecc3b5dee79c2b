"""Figures of one or several settings, each kind declared once in `KINDS`, and drawing of all of them into files."""

import gc
import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from accordion_bench.report import AS_PNG, FIGURES, Print, parallel
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.render.captions import heading
from accordion_bench.report.render.figures.curves import (
    accuracy_against,
    accuracy_modelled,
    consensus_distance,
    tradeoff,
)
from accordion_bench.report.render.figures.finals import bits_bucket, breakdown, forest, period, to_target, workers
from accordion_bench.report.render.figures.layers import codebooks, level_maps, norms, side_by_side, variance
from accordion_bench.report.render.figures.sheet import register, save, styled
from accordion_bench.runs.untrusted import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MANY = 10  # number of arms beyond which `comparison` has rows instead of curves


class FigureKind(NamedTuple):
    """One figure of a setting.

    draw: function of its arms and the bandwidths of links in bit/s; returns None if there is nothing to show.
    title: title of its picture on the page; "" = the page draws it itself.
    """

    draw: Callable[[Sequence[Arm], Sequence[float]], "Figure | None"]
    title: str = ""


KINDS = {
    "comparison": FigureKind(lambda arms, _: forest(arms) if len(arms) > MANY else side_by_side(arms)),
    "forest": FigureKind(lambda arms, _: forest(arms) if 1 < len(arms) <= MANY else None),
    "accuracy_epoch": FigureKind(lambda arms, _: accuracy_against(arms, "epoch")),
    "accuracy_bytes": FigureKind(lambda arms, _: accuracy_against(arms, "payload_bytes")),
    "accuracy_wire": FigureKind(lambda arms, _: accuracy_against(arms, "wire_bytes")),
    "accuracy_time": FigureKind(lambda arms, _: accuracy_against(arms, "seconds")),
    "accuracy_modelled": FigureKind(accuracy_modelled),
    "accuracy_simulated": FigureKind(
        lambda arms, _: accuracy_against(arms, "simulated_seconds"), "Against simulated time"
    ),
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
INTERACTIVE = frozenset(name for name, kind in KINDS.items() if not kind.title)  # figures that the page draws itself


def title(png: Path) -> str:
    """Return the page's title of a picture, by its file name."""
    name = png.stem.partition("-")[0]
    return KINDS[name].title if name in KINDS else "Against the number of workers"


def draw_all(arms: Sequence[Arm], out: Path, suffix: str = "") -> list[Path]:
    """Write every figure that the arms of one setting allow, as PNG; return the files."""
    drawn = (draw_one(name, arms, out, suffix) for name in OF_A_SETTING)
    return [png for png in drawn if png is not None]


def draw_one(name: str, arms: Sequence[Arm], out: Path, suffix: str = "", printed: Print = AS_PNG) -> Path | None:
    """Write one figure, of OF_A_SETTING, of one setting; return the PNG file, or None if there is nothing to show."""
    with styled(printed.paper):
        figure = KINDS[name].draw(arms, printed.bandwidths)
        return None if figure is None else save(figure, out / f"{name}{suffix}", printed.formats)


def draw_across(settings: Sequence[Sequence[Arm]], out: Path, printed: Print = AS_PNG) -> list[Path]:
    """Write the figures that compare settings, given as lists of arms; return the PNG files."""
    with styled(printed.paper):
        figure = workers(settings)
        return [] if figure is None else [save(figure, out / "workers", printed.formats)]


# ---- all figures of a report


LONGEST = 64  # characters of a setting's name in the names of its files


class DrawnFigures(NamedTuple):
    """The figures of one setting.

    figures: PNG files.
    failed: a sentence for each figure that could not be drawn.
    """

    figures: list[Path]
    failed: list[str]


_parts: Sequence[Sequence[Arm]] = ()  # inherited by forks, so rows are not pickled


def draw(
    parts: Sequence[Sequence[Arm]], out: Path, names: Sequence[str], printed: Print = AS_PNG
) -> list[DrawnFigures]:
    """Draw some figures of every setting in parallel processes.

    Args:
        parts: arms of each setting.
        out: folder.
        names: names of the figures, from OF_A_SETTING.
        printed: output settings.

    Raises:
        OSError: the folder cannot be written.
    """
    global _parts
    _parts = parts
    todo = [(name, i, out, suffix, printed) for i, suffix in enumerate(suffixes_of(parts)) for name in names]
    gc.freeze()  # keeps the garbage collector from scanning the millions of objects of all runs
    try:
        register()  # once for all processes
        drawn = parallel.map_isolated(_draw, todo, "drawing", _killed)
    finally:
        gc.unfreeze()
        _parts = ()
    of_each = [drawn[i : i + len(names)] for i in range(0, len(drawn), len(names))]
    return [
        DrawnFigures([png for png in found if isinstance(png, Path)], [why for why in found if isinstance(why, str)])
        for found in of_each
    ]


def suffixes_of(parts: Sequence[Sequence[Arm]]) -> list[str]:
    """Return the suffix of each setting's file names, derived from the setting so that other runs do not change it."""
    if len(parts) < 2:
        return [""] * len(parts)
    named = [_short(heading(arms[0])) for arms in parts]
    before = [named[:i].count(name) for i, name in enumerate(named)]
    return [f"-{name}{f'-{count + 1}' if count else ''}" for name, count in zip(named, before, strict=True)]


def _short(name: str) -> str:
    """Shorten a heading to `vgg19-on-cifar10-4x32-12-epochs-5000-held-out`; a long one is cut and ends with a hash."""
    words = re.sub(r"(\d),(?=\d)", r"\1", name.lower())
    words = re.sub(r" workers? x | or ", "x", words).replace(" samples", "").replace(" of the training held", " held")
    words = re.sub("[^a-z0-9]+", "-", words).strip("-")
    if len(words) <= LONGEST:
        return words
    return f"{words[: LONGEST - 9].strip('-')}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"


def _draw(name: str, number: int, out: Path, suffix: str, printed: Print) -> Path | str | None:
    """Draw one figure; return a sentence if that fails, because invalid runs must not break other figures."""
    try:
        return draw_one(name, _parts[number], out, suffix, printed)
    except OSError:  # for instance, the disk is full
        raise
    except Exception as error:
        return _failed(name, number, out, suffix, f"{type(error).__name__}: {error}")


def _killed(name: str, number: int, out: Path, suffix: str, printed: Print) -> str:
    return _failed(name, number, out, suffix, "the process that drew it was killed")


def _failed(name: str, number: int, out: Path, suffix: str, why: str) -> str:
    """Remove the files of a failed figure and return the sentence about it."""
    for ending in FIGURES:
        (out / f"{name}{suffix}.{ending}").unlink(missing_ok=True)
    return printable(f"{name} of {heading(_parts[number][0])}: {why}", longest=500)
