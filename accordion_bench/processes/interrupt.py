"""Ctrl-C and SIGTERM: finish the step on which all processes agree, save, leave."""

import math
import time
from types import FrameType
from typing import Any

AT_ONCE = 1.0  # seconds after which a second signal is meant: launchers and `timeout` deliver one of them twice
LOOK = 0.2  # seconds between two looks into the store
AHEAD = 1.0  # seconds between the decision to stop and the stop


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop.

    Args:
        step: optimizer steps taken and saved; None: stopped at once, only older checkpoints are there.
        signum: what asked for it; the exit status is 128 + signum.
    """

    def __init__(self, step: int | None, signum: int) -> None:
        super().__init__("stopped at once" if step is None else f"stopped after step {step}")
        self.step, self.signum = step, signum


class Stopper:
    """Notes the signal, and names a step after which every process stops.

    Processes share what they have noted through a store that each reads a few times per second, so that it does not
    matter which of them got the signal. The leader then publishes a step a second ahead: by then all have read it.

    Args:
        leader: whether this process decides.
        store: torch.distributed store shared by the processes; None with one process.
    """

    def __init__(self, leader: bool = True, store: Any = None) -> None:
        self.leader, self.store = leader, store
        self.signum: int | None = None
        self._noted = 0.0
        self._stop_after: int | None = None
        self._last_step = self._next_look = time.monotonic()
        self._fastest = math.inf

    def note(self, signum: int, frame: FrameType | None) -> None:
        """The handler of SIGINT and SIGTERM: notes the first one; a second one ends the run at once."""
        if self.signum is None:
            self.signum, self._noted = signum, time.monotonic()
        elif self.store is None and time.monotonic() > self._noted + AT_ONCE:
            raise Interrupted(None, signum)

    def due(self, step: int) -> bool:
        """Whether to stop now, after `step` steps; call once per step."""
        if self.store is None:
            return self.signum is not None
        now = time.monotonic()
        self._fastest = min(self._fastest, now - self._last_step)
        self._last_step = now
        if self._stop_after is None and now >= self._next_look:
            self._next_look = now + LOOK
            self._look(step)
        return self._stop_after is not None and step >= self._stop_after

    def _look(self, step: int) -> None:
        """Tell the others, and learn from them."""
        if self.signum is not None:
            self.store.set("signal", str(self.signum))
        elif self.store.check(["signal"]):
            self.signum = int(self.store.get("signal"))
        if self.leader and self.signum is not None:
            self._stop_after = step + 2 + math.ceil(AHEAD / max(self._fastest, 1e-4))
            self.store.set("stop_after", str(self._stop_after))
        elif not self.leader and self.store.check(["stop_after"]):
            self._stop_after = int(self.store.get("stop_after"))
