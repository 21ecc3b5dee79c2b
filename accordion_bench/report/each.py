"""The same work on many runs, in as many processes as there are cores: a thousand runs are half a minute of reading."""

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from accordion_bench.processes.interrupt import end_with_parent
from accordion_bench.report.progress import told

S = TypeVar("S")
T = TypeVar("T")
MANY = 200  # items, from which processes are worth their start
TOGETHER = 8  # items that one message holds


def each(work: Callable[[S], T], items: Sequence[S], what: str) -> list[T]:
    """What the work makes of each item, in their order; here, where a process was killed.

    Args:
        work: a function of a module.
        items: few enough bytes to be sent.
        what: is done, for the progress.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    if cores > 1 and len(items) >= MANY:
        try:
            with ProcessPoolExecutor(cores, multiprocessing.get_context("fork"), _begin) as pool:
                return list(told(pool.map(work, items, chunksize=TOGETHER), len(items), what))
        except BrokenProcessPool:
            pass
    return [work(item) for item in told(items, len(items), what)]


def _begin() -> None:
    """In each process: what is here already is not looked through by the collector, which would copy it."""
    end_with_parent()
    gc.freeze()
