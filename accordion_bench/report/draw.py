"""Figures of several settings at once: drawing takes longest."""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from accordion_bench.report import figures
from accordion_bench.report.arms import Arm

_parts: Sequence[Sequence[Arm]] = ()  # what children find when they are forked: rows of a hundred runs, never pickled


def draw(parts: Sequence[Sequence[Arm]], out: Path, bandwidths: Sequence[float]) -> list[list[Path]]:
    """Draw every figure of every setting; returns the PNG files of each.

    Args:
        parts: the arms of each setting.
        out: folder.
        bandwidths: bit/s of the links in figures of modelled time.
    """
    global _parts
    names = [f"-{i}" if len(parts) > 1 else "" for i in range(1, len(parts) + 1)]
    workers = min(len(parts), len(os.sched_getaffinity(0))) if sys.platform == "linux" else 1
    if workers < 2:
        return [figures.draw_all(arms, out, name, bandwidths) for arms, name in zip(parts, names, strict=True)]
    _parts = parts
    try:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _one_thread) as pool:
            waiting = [pool.submit(_draw, i, out, name, bandwidths) for i, name in enumerate(names)]
            return [each.result() for each in waiting]
    finally:
        _parts = ()


def _draw(number: int, out: Path, name: str, bandwidths: Sequence[float]) -> list[Path]:
    return figures.draw_all(_parts[number], out, name, bandwidths)


def _one_thread() -> None:
    """A forked process has none of its parent's threads: torch, which level maps ask for shapes, must not use them."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
