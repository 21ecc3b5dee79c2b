"""The same work on many things, in as many processes as there are cores, with its progress on stderr."""

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
PATIENCE = 9.5  # seconds without a line
MANY = 200  # items, from which processes are worth their start
TOGETHER = 8  # items that one message holds


def told(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """The items; meanwhile stderr shows how many are done.

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


def each(work: Callable[[S], T], items: Sequence[S], what: str) -> list[T]:
    """The results of all items, in their order. Where a process was killed, all are computed in this process.

    Args:
        work: a function of a module.
        items: few enough bytes to be sent.
        what: is done, for the progress.
    """
    if len(items) >= MANY and cores() > 1:
        try:
            with _pool(cores()) as pool:
                return list(told(pool.map(work, items, chunksize=TOGETHER), len(items), what))
        except BrokenProcessPool:
            pass
    return [work(item) for item in told(items, len(items), what)]


def each_apart(
    work: Callable[..., T], items: Sequence[tuple[Any, ...]], what: str, killed: Callable[..., T]
) -> list[T]:
    """The results of all items, in their order, where one of them may use up the memory.

    Each is sent by itself. Where a process was killed, each item that is left has a process of its own.

    Args:
        work: a function of a module.
        items: arguments, few enough bytes to be sent.
        what: is done, for the progress.
        killed: the result for an item whose own process was killed, too.
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
    """How many processes may compute at once: several where processes are forked safely."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _begin)


def _begin() -> None:
    """In each process: the collector skips what the parent had, and torch uses none of the parent's threads."""
    end_with_parent()
    gc.freeze()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
