"""A process ends with its parent, whatever has ended that: nothing else would stop it or read its output."""

import multiprocessing
import os
import threading
import time
from multiprocessing import connection

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
