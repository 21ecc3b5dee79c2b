"""Ctrl-C and SIGTERM: finish the step on which all processes agree, save, leave."""

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop and has saved its state.

    Args:
        step: optimizer steps taken.
        signum: what asked for it; the exit status is 128 + signum.
    """

    def __init__(self, step: int, signum: int) -> None:
        super().__init__(f"stopped after step {step}")
        self.step, self.signum = step, signum


class Stopper:
    """Notes the signal, and names a step after which every process stops.

    Nothing is exchanged before a signal arrives. Then the leader publishes a step at least a second ahead in the store,
    so that every process of this job has seen its own copy of the signal by then.

    Args:
        leader: whether this process decides.
        store: torch.distributed store shared by the processes; None with one process.
    """

    def __init__(self, leader: bool = True, store: Any = None) -> None:
        self.leader, self.store = leader, store
        self.signum: int | None = None
        self._stop_after: int | None = None
        self._started, self._steps = time.perf_counter(), 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Note SIGINT and SIGTERM instead of dying of them; a second SIGINT is a KeyboardInterrupt again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signum: signal.signal(signum, self._note) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _note(self, signum: int, frame: Any) -> None:
        if self.signum is not None and self.store is None:
            raise KeyboardInterrupt
        self.signum = signum

    def due(self, step: int) -> bool:
        """Whether to stop now, after `step` steps; call once per step."""
        self._steps += 1
        if self.signum is None:
            return False
        if self.store is None:
            return True
        if self._stop_after is None:
            if self.leader:
                pace = (time.perf_counter() - self._started) / self._steps
                self._stop_after = step + 2 + math.ceil(1.0 / pace)
                self.store.set("stop_after", str(self._stop_after))
            elif self.store.check(["stop_after"]):
                self._stop_after = int(self.store.get("stop_after"))
        return self._stop_after is not None and step >= self._stop_after
