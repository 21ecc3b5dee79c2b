"""Run the command line with each spawned worker in a network namespace of a lab, behind a link that can be cut.

    ip netns exec LAB-0 python -m scripts.behind_links LAB HOSTS FOLDER OVERRIDES

The launcher and its store are in host 0, the workers in hosts 1 to HOSTS - 1, one in each. A replacement takes the host
of the worker that was lost.
"""

import fcntl
import multiprocessing
import os
import sys
from pathlib import Path

from accordion_bench.netlab.hosts import INTERFACE, Hosts


def run(lab: str, hosts: int, folder: Path, overrides: list[str]) -> None:
    """Run `python -m accordion_bench OVERRIDES` as the launcher in host 0.

    Args:
        lab: first part of the names of the namespaces.
        hosts: number of hosts.
        folder: for the notes which worker has which host.
        overrides: of the run.
    """
    from accordion_bench.__main__ import main
    from accordion_bench.processes.replacing import Replaced

    stub = folder / "python"
    stub.write_text(
        f'#!/bin/sh\nexec {sys.executable} -m scripts.behind_links {lab} {hosts} {folder} --enter "$@"\n',
        encoding="utf-8",
    )
    stub.chmod(0o700)
    multiprocessing.set_executable(str(stub))
    Replaced.host = Hosts.address(0)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # sockets there have no host names, which torch warns of
    sys.argv[1:] = [*overrides, f"comm.interface={INTERFACE}"]
    main()


def enter(lab: str, hosts: int, folder: Path, arguments: list[str]) -> None:
    """Become the Python process that multiprocessing wants to start: a worker, in a host that is free.

    Args:
        lab, hosts, folder: as for `run`.
        arguments: of Python.
    """
    command = [sys.executable, *arguments]
    if any("spawn_main" in word for word in arguments):
        command = ["ip", "netns", "exec", f"{lab}-{free_host(hosts, folder)}", *command]
    os.execvp(command[0], command)


def free_host(hosts: int, folder: Path) -> int:
    """A host without a worker, which is noted for this process; the last one where all have a worker."""
    with (folder / "lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for host in range(1, hosts):
            note = folder / str(host)
            if not note.exists() or not _lives(int(note.read_text(encoding="utf-8"))):
                note.write_text(str(os.getpid()), encoding="utf-8")
                return host
    return hosts - 1


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


if __name__ == "__main__":
    place = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if sys.argv[4:5] == ["--enter"]:
        enter(*place, sys.argv[5:])
    run(*place, sys.argv[4:])
