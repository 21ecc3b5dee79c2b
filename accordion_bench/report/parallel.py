"""Parallel map over processes, with progress on stderr."""

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from tqdm import tqdm

from accordion_bench import output
from accordion_bench.processes.interrupt import end_with_parent

S = TypeVar("S")
T = TypeVar("T")
PATIENCE = 9.5  # seconds between lines of progress
MANY = 200  # smallest number of items for which starting processes pays off
TOGETHER = 8  # items per message


def told(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yield the items while showing progress on stderr; `what` is the activity, such as `drawing`."""
    if output.can_draw(sys.stderr):
        yield from tqdm(items, total=total, desc=what, file=sys.stderr, leave=False, delay=1, mininterval=0.2)
        return
    said = time.monotonic()
    for done, item in enumerate(items, 1):
        yield item
        if time.monotonic() - said >= PATIENCE:
            said = time.monotonic()
            print(f"{what}: {done} of {total}", file=sys.stderr, flush=True)


def each(work: Callable[[S], T], items: Sequence[S], what: str) -> list[T]:
    """Return the results of all items, in order. If a process is killed, all are recomputed in this process.

    Args:
        work: function defined at module level.
        items: arguments, small enough to be sent to a process.
        what: the activity, for the progress.
    """
    if len(items) >= MANY and cores() > 1:
        try:
            with _pool(cores()) as pool:
                return list(told(pool.map(work, items, chunksize=TOGETHER), len(items), what))
        except BrokenProcessPool:
            pass
    return [work(item) for item in told(items, len(items), what)]


def map_isolated(
    work: Callable[..., T], items: Sequence[tuple[Any, ...]], what: str, killed: Callable[..., T]
) -> list[T]:
    """Return the results of all items, in order, when one of them may exhaust the memory.

    Each item is sent separately. If a process is killed, each remaining item gets its own process.

    Args:
        work: function defined at module level.
        items: arguments, small enough to be sent to a process.
        what: the activity, for the progress.
        killed: function that returns the result of an item whose own process was killed, too.
    """

    def submitted(pool: ProcessPoolExecutor, item: tuple[Any, ...]) -> "Future[T] | None":
        try:
            return pool.submit(work, *item)
        except BrokenProcessPool:
            return None

    def alone(item: tuple[Any, ...]) -> T:
        try:
            with _pool(1) as own:
                return own.submit(work, *item).result()
        except BrokenProcessPool:
            return killed(*item)

    if min(len(items), cores()) < 2:
        return [work(*item) for item in told(items, len(items), what)]
    done: list[T] = []
    with _pool(min(len(items), cores())) as pool:
        try:
            asked = [submitted(pool, item) for item in items]
            for item, one in told(zip(items, asked, strict=True), len(items), what):
                try:
                    done.append(one.result() if one else alone(item))
                except BrokenProcessPool:
                    done.append(alone(item))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return done


def cores() -> int:
    """Return the number of processes that may compute at once; more than one only where forking is safe."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _begin)


def _begin() -> None:
    """Initialise a process: freeze inherited objects for the garbage collector, and limit torch to one thread."""
    end_with_parent()
    gc.freeze()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
