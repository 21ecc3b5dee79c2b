"""Removal of a lab's hosts after the end of its owner: `python -m accordion_bench.netlab.janitor LAB`.

The owner holds the other end of this process's standard input, which the operating system closes when the owner ends in
any way. The owner also holds the lab's lock, which the system then releases. A lab with a free lock is therefore an
orphan. Process numbers would be unreliable, because containers number processes separately but may share namespaces.
"""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

from filelock import FileLock, Timeout

NAMESPACES = Path("/run/netns")
LOCKS = Path("/run/accordion_bench")
LAB = re.compile(r"ab-\d+\.[0-9a-f]{8}")  # number of the owner's process, for information; a unique suffix


def new_lab() -> str:
    """Return a unique name for a lab."""
    return f"ab-{os.getpid()}.{secrets.token_hex(4)}"


def hold(lab: str) -> FileLock:
    """Acquire the lab's lock, which is held until it is released or this process ends."""
    LOCKS.mkdir(mode=0o755, parents=True, exist_ok=True)
    lock = _lock(lab)
    lock.acquire(timeout=5)  # a process that removes orphans may hold it briefly
    return lock


def names(prefix: str = "ab-") -> list[str]:
    """Return the namespaces whose names start with a prefix."""
    return sorted(path.name for path in NAMESPACES.glob(f"{prefix}*")) if NAMESPACES.is_dir() else []


def remove(namespaces: list[str]) -> None:
    """Kill all processes in these namespaces, and delete the namespaces with their links."""
    deadline = time.monotonic() + 5
    while (living := [pid for name in namespaces for pid in _inhabitants(name)]) and time.monotonic() < deadline:
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for name in namespaces:
        _ip("netns", "delete", name)  # another process may have done it


def remove_orphans() -> None:
    """Remove the hosts of labs whose owner and janitor ended without doing so."""
    for file in sorted(LOCKS.glob("ab-*.lock")):
        if not LAB.fullmatch(file.stem):
            continue
        with contextlib.suppress(Timeout), _lock(file.stem):
            clear(file.stem)


def clear(lab: str) -> None:
    """Remove a lab's hosts, then its lock."""
    remove(names(f"{lab}-"))
    (LOCKS / f"{lab}.lock").unlink(missing_ok=True)


def _lock(lab: str) -> FileLock:
    return FileLock(LOCKS / f"{lab}.lock", timeout=0, fallback_to_soft=False)


def _inhabitants(name: str) -> list[int]:
    return [int(pid) for pid in _ip("netns", "pids", name).split()]


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True).stdout


def main() -> None:
    """Wait for the end of the owner, then remove the hosts."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sys.stdin.read()
    clear(sys.argv[1])


if __name__ == "__main__":
    main()
