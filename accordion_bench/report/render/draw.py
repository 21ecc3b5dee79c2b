"""Several figures at once: drawing takes longest."""

import gc
import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.progress import told
from accordion_bench.report.render import figures
from accordion_bench.report.render.captions import heading
from accordion_bench.report.render.figures import font

_parts: Sequence[Sequence[Arm]] = ()  # what children find when they are forked: rows of a hundred runs, never pickled


def draw(parts: Sequence[Sequence[Arm]], out: Path, bandwidths: Sequence[float], pdf: bool = False) -> list[list[Path]]:
    """Draw every figure of every setting, one in each process at a time; returns the PNG files of each setting.

    Args:
        parts: the arms of each setting.
        out: folder.
        bandwidths: bit/s of the links in figures of modelled time.
        pdf: a PDF beside each PNG.
    """
    global _parts
    _parts = parts
    names, suffixes = figures.OF_A_SETTING, suffixes_of(parts)
    todo = [(name, i, out, suffix, bandwidths, pdf) for i, suffix in enumerate(suffixes) for name in names]
    workers = min(len(todo), len(os.sched_getaffinity(0))) if sys.platform == "linux" else 1
    gc.freeze()  # the rows of all runs are millions of objects, which every collection would look through
    try:
        if workers < 2:
            drawn = [_draw(*figure) for figure in told(todo, len(todo), "drawing")]
        else:
            font.register()  # once for all
            with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _one_thread) as pool:
                drawn = list(told(pool.map(_draw, *zip(*todo, strict=True)), len(todo), "drawing"))
    finally:
        gc.unfreeze()
        _parts = ()
    of_each = [drawn[i : i + len(names)] for i in range(0, len(drawn), len(names))]
    return [[png for png in pngs if png is not None] for pngs in of_each]


def suffixes_of(parts: Sequence[Sequence[Arm]]) -> list[str]:
    """Of the names of each setting's files: what it is, so that other runs beside it rename nothing."""
    if len(parts) < 2:
        return [""] * len(parts)
    named = [re.sub("[^a-z0-9]+", "-", heading(arms[0]).lower()).strip("-") for arms in parts]
    before = [named[:i].count(name) for i, name in enumerate(named)]
    return [f"-{name}{f'-{count + 1}' if count else ''}" for name, count in zip(named, before, strict=True)]


def _draw(name: str, number: int, out: Path, suffix: str, bandwidths: Sequence[float], pdf: bool) -> Path | None:
    return figures.draw_one(name, _parts[number], out, suffix, bandwidths, pdf)


def _one_thread() -> None:
    """A forked process has none of its parent's threads: torch, which level maps ask for shapes, must not use them."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
