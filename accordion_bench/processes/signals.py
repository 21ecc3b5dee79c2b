"""Signals: who answers those that ask a run to stop, and for how long."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

Handler = Callable[[int, FrameType | None], object] | int | None  # int: SIG_DFL or SIG_IGN

# the time is nearly over: Slurm sends one of them early (--signal), the kernel the other one, again and again
WARNINGS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGXCPU") if hasattr(signal, name))
STOP = (signal.SIGINT, signal.SIGTERM, *WARNINGS)


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
