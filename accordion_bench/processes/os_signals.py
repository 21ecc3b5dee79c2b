"""Signals: who answers those that ask a run to stop, and for how long."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

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
