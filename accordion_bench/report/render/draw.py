"""Several figures at once: drawing takes longest."""

import gc
import hashlib
import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

from accordion_bench.processes.interrupt import end_with_parent
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.parallel import told
from accordion_bench.report.render import AS_PNG, FIGURES, Print, figures
from accordion_bench.report.render.captions import heading
from accordion_bench.report.render.figures import sheet
from accordion_bench.runs.untrusted import printable

LONGEST = 64  # letters of the name of a setting in the names of its files


class DrawnFigures(NamedTuple):
    """The figures of one setting.

    figures: the PNG files.
    failed: a sentence for each that could not be drawn.
    """

    figures: list[Path]
    failed: list[str]


_parts: Sequence[Sequence[Arm]] = ()  # what children find when they are forked: rows of a hundred runs, never pickled


def draw(
    parts: Sequence[Sequence[Arm]],
    out: Path,
    names: Sequence[str],
    printed: Print = AS_PNG,
) -> list[DrawnFigures]:
    """Draw some figures of every setting, one in each process at a time.

    Args:
        parts: the arms of each setting.
        out: folder.
        names: of the figures, some of `figures.OF_A_SETTING`.
        printed: how.

    Raises:
        OSError: the folder takes no files.
    """
    global _parts
    _parts = parts
    suffixes = suffixes_of(parts)
    todo = [(name, i, out, suffix, printed) for i, suffix in enumerate(suffixes) for name in names]
    workers = min(len(todo), len(os.sched_getaffinity(0))) if sys.platform == "linux" else 1
    gc.freeze()  # the rows of all runs are millions of objects, which every collection would look through
    try:
        if workers < 2:
            drawn = [_draw(*figure) for figure in told(todo, len(todo), "drawing")]
        else:
            sheet.register()  # once for all
            drawn = _in_processes(todo, workers)
    finally:
        gc.unfreeze()
        _parts = ()
    of_each = [drawn[i : i + len(names)] for i in range(0, len(drawn), len(names))]
    return [
        DrawnFigures([png for png in found if isinstance(png, Path)], [why for why in found if isinstance(why, str)])
        for found in of_each
    ]


def _in_processes(todo: Sequence[tuple[Any, ...]], workers: int) -> list[Path | str | None]:
    """Draw in forked processes. Where one is killed, for its memory say, those that are left are drawn one by one."""
    drawn: list[Path | str | None] = []
    with _pool(workers) as pool:
        try:
            asked = [_submitted(pool, figure) for figure in todo]
            for figure, one in told(zip(todo, asked, strict=True), len(todo), "drawing"):
                try:
                    drawn.append(one.result() if one else _alone(figure))
                except BrokenProcessPool:
                    drawn.append(_alone(figure))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return drawn


def _submitted(pool: ProcessPoolExecutor, figure: tuple[Any, ...]) -> "Future[Path | str | None] | None":
    """None where a process of the pool has been killed already."""
    try:
        return pool.submit(_draw, *figure)
    except BrokenProcessPool:
        return None


def _alone(figure: tuple[Any, ...]) -> Path | str | None:
    """Draw in a process of its own, which may be killed."""
    try:
        with _pool(1) as pool:
            return pool.submit(_draw, *figure).result()
    except BrokenProcessPool:
        name, number, out, suffix, *_ = figure
        _remove(out, name, suffix)
        return _sentence(name, number, "the process that drew it was killed")


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _one_thread)


def suffixes_of(parts: Sequence[Sequence[Arm]]) -> list[str]:
    """Of the names of each setting's files: what it is, so that other runs beside it rename nothing."""
    if len(parts) < 2:
        return [""] * len(parts)
    named = [_short(heading(arms[0])) for arms in parts]
    before = [named[:i].count(name) for i, name in enumerate(named)]
    return [f"-{name}{f'-{count + 1}' if count else ''}" for name, count in zip(named, before, strict=True)]


def _short(name: str) -> str:
    """`vgg19-on-cifar10-4x32-12-epochs-5000-held-out` of a heading; the end of a long one is a number."""
    words = re.sub(r"(\d),(?=\d)", r"\1", name.lower())
    words = re.sub(r" workers? x | or ", "x", words).replace(" samples", "").replace(" of the training held", " held")
    words = re.sub("[^a-z0-9]+", "-", words).strip("-")
    if len(words) <= LONGEST:
        return words
    return f"{words[: LONGEST - 9].strip('-')}-{hashlib.sha256(words.encode()).hexdigest()[:8]}"


def _draw(name: str, number: int, out: Path, suffix: str, printed: Print) -> Path | str | None:
    """Draw one figure; a sentence where it cannot be drawn: what a stranger's runs hold must not end all others."""
    try:
        return figures.draw_one(name, _parts[number], out, suffix, printed)
    except OSError:  # the disk is full, say
        raise
    except Exception as error:
        _remove(out, name, suffix)
        return _sentence(name, number, f"{type(error).__name__}: {error}")


def _remove(out: Path, name: str, suffix: str) -> None:
    for ending in FIGURES:
        (out / f"{name}{suffix}.{ending}").unlink(missing_ok=True)


def _sentence(name: str, number: int, why: str) -> str:
    return printable(f"{name} of {heading(_parts[number][0])}: {why}", longest=500)


def _one_thread() -> None:
    """A forked process has none of its parent's threads: torch, which level maps ask for shapes, must not use them."""
    end_with_parent()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
