"""How a run ends early: signals of the operating system, Ctrl-C, and the end of the parent."""

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
    """Those that this system has and that were not ignored when the process started: nohup ignores SIGHUP."""
    found = [getattr(signal, name) for name in names if hasattr(signal, name)]
    return tuple(signum for signum in found if signum != _HANGUP or signal.getsignal(signum) != signal.SIG_IGN)


_AGAIN = ("SIGHUP", "SIGUSR1", "SIGXCPU")
# the terminal has been closed, or the time is nearly over: kernel, shell and Slurm (--signal) say so again and again
WARNINGS = _here(*_AGAIN)
STOP = (signal.SIGINT, signal.SIGTERM, *WARNINGS)
# what a parent may ignore while it starts processes, which inherit that: they could not tell it from nohup
ANSWERED_LATER = tuple(signum for signum in STOP if signum != _HANGUP)
ANYWHERE = {signal.SIGINT, signal.SIGTERM, *(getattr(signal, name, None) for name in _AGAIN)}  # on whichever machine


def handle(handler: Handler, signums: Sequence[int] = STOP) -> dict[int, Handler]:
    """Let `handler` answer these signals from now on.

    Returns:
        who has answered them until now; empty in other threads than the main one, where Python installs no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {signum: signal.signal(signum, handler) for signum in signums}


@contextlib.contextmanager
def handling(handler: Handler, signums: Sequence[int] = STOP) -> Iterator[None]:
    """Let `handler` answer these signals inside, and those who did before from then on."""
    before = handle(handler, signums)
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)


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


LOOK = 0.5  # seconds between two looks


def end_with_parent(parent: int | None = None) -> None:
    """From now on end this process when its parent is gone, soon and without a word.

    Not by the kernel's own signal for it (PR_SET_PDEATHSIG): that comes when the thread ends that has started this
    process, and pools start processes from threads.

    Args:
        parent: number of that process; None = the one by whose multiprocessing it was started.
    """
    server: list[int] = []  # of forks has started this process: then its parent's end is seen by a pipe alone
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
    """Whether a process that was this one's parent is so no more."""
    return os.getppid() != parent
