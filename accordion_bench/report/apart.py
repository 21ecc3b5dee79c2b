"""Classes looked at by a process of its own, which ends when it has told: to import one takes half a gigabyte."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from accordion_bench.methods import declared
from accordion_bench.methods.declared import Declared, of_class
from accordion_bench.options.instantiate import Config
from accordion_bench.processes.parent import end_with_parent

_known: dict[str, Declared | None] = {}  # by config node


@contextlib.contextmanager
def classes_apart() -> Iterator[None]:
    """Inside, this process imports no class to name an arm, unless torch is loaded already; what it hears it keeps."""
    if "torch" in sys.modules:
        yield
        return
    with contextlib.closing(_Asked()) as asked:
        declared.look = asked
        try:
            yield
        finally:
            declared.look = of_class


class _Asked:
    """Has classes looked at by another process, which is started for the first one that is not known yet."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.pool: ProcessPoolExecutor | None = None

    def __call__(self, node: Config) -> Declared | None:
        if os.getpid() != self.pid:  # one of a pool that reads many runs: it ends soon
            return of_class(node)
        key = json.dumps(node, sort_keys=True, default=str)
        if key not in _known:
            if self.pool is None:
                spawned = multiprocessing.get_context("spawn")
                self.pool = ProcessPoolExecutor(1, spawned, _begin, (sys.path,))
            try:
                _known[key] = self.pool.submit(of_class, node).result()
            except BrokenProcessPool:  # it was killed
                return of_class(node)
        return _known[key]

    def close(self) -> None:
        """End the other process."""
        if self.pool is not None:
            self.pool.shutdown()


def _begin(path: list[str]) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with what it was asked
    sys.path[:] = path
