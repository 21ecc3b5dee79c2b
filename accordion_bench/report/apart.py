"""Classes looked at by a process of its own, which ends when it has told: to import one takes half a gigabyte."""

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from accordion_bench.methods import labels
from accordion_bench.methods.labels import of_class
from accordion_bench.processes.interrupt import end_with_parent
from accordion_bench.report.render import rebuilt

_known: dict[str, Any] = {}  # by what was asked


@contextlib.contextmanager
def classes_apart() -> Iterator[None]:
    """Inside, this process imports no class to name or draw an arm, unless torch is loaded; what it hears it keeps."""
    if "torch" in sys.modules:
        yield
        return
    with contextlib.closing(_Asked()) as asked:
        labels.look = functools.partial(asked, of_class)
        rebuilt.look = functools.partial(asked, rebuilt.of_classes)
        try:
            yield
        finally:
            labels.look, rebuilt.look = of_class, rebuilt.of_classes


class _Asked:
    """Has classes looked at by another process, which is started for the first one that is not known yet."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.pool: ProcessPoolExecutor | None = None

    def __call__(self, look: Callable[..., Any], *about: Any) -> Any:
        if os.getpid() != self.pid:  # one of a pool that reads many runs: it ends soon
            return look(*about)
        key = json.dumps([look.__name__, *about], sort_keys=True, default=str)
        if key not in _known:
            if self.pool is None:
                spawned = multiprocessing.get_context("spawn")
                self.pool = ProcessPoolExecutor(1, spawned, _begin, (sys.path,))
            try:
                _known[key] = self.pool.submit(look, *about).result()
            except BrokenProcessPool:  # it was killed
                return look(*about)
        return _known[key]

    def close(self) -> None:
        """End the other process."""
        if self.pool is not None:
            self.pool.shutdown()


def _begin(path: list[str]) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with what it was asked
    sys.path[:] = path
