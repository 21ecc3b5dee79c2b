"""Early end of a run: operating-system signals, Ctrl-C, and the end of the parent process."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from types import FrameType

from accordion_bench.comm.sealed_store import AgreedStep, SealedStore, whole_number

Handler = Callable[[int, FrameType | None], object] | int | None  # int: SIG_DFL or SIG_IGN

_HANGUP = getattr(signal, "SIGHUP", None)


def _here(*names: str) -> tuple[signal.Signals, ...]:
    """Return the signals that this system has and that were not ignored at start-up (nohup ignores SIGHUP)."""
    found = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return tuple(signum for signum in found if signum != _HANGUP or signal.getsignal(signum) != signal.SIG_IGN)


_AGAIN = ("SIGHUP", "SIGUSR1", "SIGXCPU")
# closed terminal, or end of the time limit; kernel, shell and Slurm (--signal) send these repeatedly
WARNINGS = _here(*_AGAIN)
STOP = (signal.SIGINT, signal.SIGTERM, *WARNINGS)
# ignored by a parent while it starts processes; not SIGHUP, since children that inherit this would assume nohup
ANSWERED_LATER = tuple(signum for signum in STOP if signum != _HANGUP)
ANYWHERE = {signal.SIGINT, signal.SIGTERM, *(getattr(signal, name, None) for name in _AGAIN)}  # on any machine


def handle(handler: Handler, signums: Sequence[int] = STOP) -> dict[int, Handler]:
    """Install a handler for these signals.

    Returns:
        the previous handlers; empty outside the main thread, where Python cannot install handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {signum: signal.signal(signum, handler) for signum in signums}


@contextlib.contextmanager
def handling(handler: Handler, signums: Sequence[int] = STOP) -> Iterator[None]:
    """Context with a handler for these signals; restores the previous handlers at its end."""
    before = handle(handler, signums)
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


AT_ONCE = 1.0  # a second signal within this many seconds is ignored: launchers and `timeout` deliver signals twice


class Interrupted(KeyboardInterrupt):
    """A signal stopped the run.

    Args:
        step: number of optimizer steps taken and saved; None = stopped immediately, without a new checkpoint.
        signum: number of the signal; the exit status is 128 + signum.
    """

    def __init__(self, step: int | None, signum: int) -> None:
        super().__init__("stopped at once" if step is None else f"stopped after step {step}")
        self.step, self.signum = step, signum


class Stopper:
    """Handler of stop signals: all processes stop after the same step, whichever of them received the signal.

    Args:
        store: store of the run, shared by its processes; None with one process.
    """

    def __init__(self, store: SealedStore | None = None) -> None:
        self.store = store
        self.signum: int | None = None
        self._noted = 0.0
        self._told: int | None = None
        self._agreed = AgreedStep("stop", store)

    def note(self, signum: int, frame: FrameType | None) -> None:
        """Record a signal, the first or one after a warning. With one process, a second raises Interrupted."""
        if self.signum is None or self.signum in WARNINGS:
            self.signum, self._noted = signum, time.monotonic()
        elif self.store is None and signum not in WARNINGS and time.monotonic() > self._noted + AT_ONCE:
            raise Interrupted(None, signum)

    def due(self, step: int) -> bool:
        """Whether to stop now, after `step` steps. Call it once per step in every process. See `AgreedStep.due`."""
        if not self._agreed.due(step, self._wanted):
            return False
        if self.signum is None and self.store is not None:
            self.signum = self.store.read("signal", _signal) or signal.SIGTERM
        return True

    def _wanted(self) -> bool:
        """Whether this process received a signal; stores its number for the others before they are asked to stop."""
        if self.store is not None and self.signum != self._told:
            self._told = self.signum
            self.store.set("signal", str(self.signum))
        return self.signum is not None


def _signal(text: str) -> int:
    if whole_number(text) not in ANYWHERE:
        raise ValueError(text)
    return int(text)


LOOK = 0.5  # seconds between two checks


def end_with_parent(parent: int | None = None) -> None:
    """Start a thread that silently ends this process soon after the end of its parent.

    The kernel's signal PR_SET_PDEATHSIG is unsuitable: it is sent when the thread that started the process ends, and
    pools start processes from threads.

    Args:
        parent: process number of the parent; None = the multiprocessing parent, if any.
    """
    server: list[int] = []  # pipe of the parent, if a fork server started this process
    if parent is None:
        started_by = multiprocessing.parent_process()
        if started_by is None or started_by.pid is None:
            return
        parent = started_by.pid
        server = [started_by.sentinel] if is_gone(parent) else []

    def watch() -> None:
        if server:
            connection.wait(server)
        while not server and not is_gone(parent):
            time.sleep(LOOK)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def is_gone(parent: int) -> bool:
    """Whether this process's former parent has ended."""
    return os.getppid() != parent
