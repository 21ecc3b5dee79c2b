"""A step after which all processes do the same, although no message travels with every step."""

import math
import time
from collections.abc import Callable
from typing import Any

LOOK = 0.2  # seconds between two looks into the store
AHEAD = 1.0  # seconds between the decision and the step


class AgreedStep:
    """The leader names a step in a store that all read a few times per second, a second ahead: by then all have.

    Args:
        name: of what is done then.
        leader: whether this process decides.
        store: torch.distributed store shared by the processes; None with one process.
    """

    def __init__(self, name: str, leader: bool = True, store: Any = None) -> None:
        self.name, self.leader, self.store = name, leader, store
        self._count = 0  # of steps that have been named and are over
        self._step: int | None = None
        self._last_step = self._next_look = time.monotonic()
        self._fastest = math.inf

    def due(self, step: int, wanted: Callable[[], bool], apart: int = 1) -> bool:
        """Whether this is the step; call it after every step, in every process.

        Args:
            step: steps taken.
            wanted: asked a few times per second; the leader's answer counts.
            apart: steps by which a process may be ahead of another one.
        """
        if self.store is None:
            return wanted()
        now = time.monotonic()
        self._fastest = min(self._fastest, now - self._last_step)
        self._last_step = now
        if self._step is None and now >= self._next_look:
            self._next_look = now + LOOK
            self._look(step + 2 * apart, wanted())
        if self._step is None or step < self._step:
            return False
        self._step, self._count = None, self._count + 1
        return True

    def _look(self, soonest: int, wanted: bool) -> None:
        key = f"{self.name}-{self._count}"
        if self.leader and wanted:
            self._step = soonest + math.ceil(AHEAD / max(self._fastest, 1e-4))
            self.store.set(key, str(self._step))
        elif not self.leader and self.store.check([key]):
            self._step = int(self.store.get(key))
