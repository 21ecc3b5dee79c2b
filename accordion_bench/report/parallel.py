"""The same work on many runs: in as many processes as there are cores, with its progress on stderr."""

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from tqdm import tqdm

from accordion_bench import output
from accordion_bench.processes.interrupt import end_with_parent

T = TypeVar("T")
PATIENCE = 9.5  # seconds without a line


def told(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """The items, while telling how many are done.

    Args:
        items: to go through.
        total: how many.
        what: is done, such as `drawing`.
    """
    if output.can_draw(sys.stderr):
        yield from tqdm(items, total=total, desc=what, file=sys.stderr, leave=False, delay=1, mininterval=0.2)
        return
    said = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        if time.monotonic() - said >= PATIENCE:
            said = time.monotonic()
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)


S = TypeVar("S")
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
