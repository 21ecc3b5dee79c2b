"""Ctrl-C, SIGTERM and the warnings of a job's end: finish the step on which all processes agree, save, leave."""

import time
from types import FrameType
from typing import Any

from accordion_bench.processes.agreed_step import AgreedStep
from accordion_bench.processes.signals import WARNINGS

AT_ONCE = 1.0  # seconds after which a second signal is meant: launchers and `timeout` deliver one of them twice


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
    """Notes the signal, and says after which step every process stops; it does not matter which of them got it.

    Args:
        leader: whether this process decides.
        store: torch.distributed store shared by the processes; None with one process.
    """

    def __init__(self, leader: bool = True, store: Any = None) -> None:
        self.leader, self.store = leader, store
        self.signum: int | None = None
        self._noted = 0.0
        self._agreed = AgreedStep("stop", leader, store)

    def note(self, signum: int, frame: FrameType | None) -> None:
        """The handler: notes the first signal; a second one that is no mere warning ends the run at once."""
        if self.signum is None or self.signum in WARNINGS:
            self.signum, self._noted = signum, time.monotonic()
        elif self.store is None and signum not in WARNINGS and time.monotonic() > self._noted + AT_ONCE:
            raise Interrupted(None, signum)

    def due(self, step: int, apart: int = 1) -> bool:
        """Whether to stop now, after `step` steps; call once per step. See `AgreedStep.due`."""
        return self._agreed.due(step, self._heard, apart)

    def _heard(self) -> bool:
        """Whether any process has noted a signal; tell the others, and learn from them."""
        if self.store is None:
            return self.signum is not None
        if self.signum is not None:
            self.store.set("signal", str(self.signum))
        elif self.store.check(["signal"]):
            self.signum = int(self.store.get("signal"))
        return self.signum is not None
