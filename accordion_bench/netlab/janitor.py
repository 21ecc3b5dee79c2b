"""python -m accordion_bench.netlab.janitor LAB: waits until its owner is gone, then removes the owner's hosts.

The owner holds the other end of this process's standard input. However the owner ends, the operating system closes it.
It also holds the lab's lock, which the system releases then: who finds a lab whose lock is free knows that nothing has
cleared up. Process numbers would not tell, since containers number theirs apart and may share namespaces.
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
LAB = re.compile(r"ab-\d+\.[0-9a-f]{8}")  # the owner's process, for those who look; what makes it the only one


def new_lab() -> str:
    """A name that no lab has."""
    return f"ab-{os.getpid()}.{secrets.token_hex(4)}"


def hold(lab: str) -> FileLock:
    """The lab's lock, held until it is released or this process is gone."""
    LOCKS.mkdir(mode=0o755, parents=True, exist_ok=True)
    lock = _lock(lab)
    lock.acquire(timeout=5)  # a process that looks for orphans may hold it for a moment
    return lock


def names(prefix: str = "ab-") -> list[str]:
    """Namespaces whose names begin so."""
    return sorted(path.name for path in NAMESPACES.glob(f"{prefix}*")) if NAMESPACES.is_dir() else []


def remove(namespaces: list[str]) -> None:
    """End what lives in these namespaces, and delete them with their links."""
    deadline = time.monotonic() + 5
    while (living := [pid for name in namespaces for pid in _inhabitants(name)]) and time.monotonic() < deadline:
        for pid in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for name in namespaces:
        _ip("netns", "delete", name)  # another process may have done it


def remove_orphans() -> None:
    """Remove hosts whose owner is gone and could not, nor its janitor."""
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
    """Wait, then clear up."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sys.stdin.read()
    clear(sys.argv[1])


if __name__ == "__main__":
    main()
