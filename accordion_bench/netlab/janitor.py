"""python -m accordion_bench.netlab.janitor PREFIX: waits until its owner is gone, then removes the owner's hosts.

The owner holds the other end of this process's standard input. However the owner ends, the operating system closes it.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

NAMESPACES = Path("/run/netns")
NAME = re.compile(r"ab-(\d+)\.(\d+)\.\d+-\w+")  # process, when it started, how many before; which host


def started(pid: int) -> int | None:
    """When a process has started, in the kernel's ticks since boot; None = it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


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
        _ip("netns", "delete", name)  # somebody else may have done it


def remove_orphans() -> None:
    """Remove hosts whose owner is gone and could not, nor its janitor."""
    orphans = []
    for name in names():
        if (found := NAME.fullmatch(name)) and started(int(found[1])) != int(found[2]):
            orphans.append(name)
    remove(orphans)


def _inhabitants(name: str) -> list[int]:
    return [int(pid) for pid in _ip("netns", "pids", name).split()]


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True).stdout


def main() -> None:
    """Wait, then clear up."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sys.stdin.read()
    remove(names(sys.argv[1]))


if __name__ == "__main__":
    main()
