"""Ctrl-C, SIGTERM, a terminal that closes, the warnings of a job's end: finish a step, save, leave.

All processes of a run agree on which step that is.
"""

import signal
import time
from types import FrameType

from accordion_bench.processes.agreed_step import AgreedStep
from accordion_bench.processes.os_signals import ANYWHERE, WARNINGS
from accordion_bench.processes.sealed_store import SealedStore, whole_number

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
        store: of the run, which the processes share; None with one process.
    """

    def __init__(self, store: SealedStore | None = None) -> None:
        self.store = store
        self.signum: int | None = None
        self._noted = 0.0
        self._told: int | None = None
        self._agreed = AgreedStep("stop", store)

    def note(self, signum: int, frame: FrameType | None) -> None:
        """The handler: notes the first signal; a second one that is no mere warning ends the run at once."""
        if self.signum is None or self.signum in WARNINGS:
            self.signum, self._noted = signum, time.monotonic()
        elif self.store is None and signum not in WARNINGS and time.monotonic() > self._noted + AT_ONCE:
            raise Interrupted(None, signum)

    def due(self, step: int) -> bool:
        """Whether to stop now, after `step` steps; call once per step, in every process. See `AgreedStep.due`."""
        if not self._agreed.due(step, self._wanted):
            return False
        if self.signum is None and self.store is not None:
            self.signum = self.store.read("signal", _signal) or signal.SIGTERM
        return True

    def _wanted(self) -> bool:
        """Whether this process has noted a signal; it tells the others which one before they are asked to stop."""
        if self.store is not None and self.signum != self._told:
            self._told = self.signum
            self.store.set("signal", str(self.signum))
        return self.signum is not None


def _signal(text: str) -> int:
    """The number of a signal that ends runs."""
    if whole_number(text) not in ANYWHERE:
        raise ValueError(text)
    return int(text)
