"""Waiting: growing pauses of polling loops, time of threads without a core, and monitoring of other processes.

`Neighbours` assigns the monitoring. The first process registered on a machine monitors all others there by process
number, and they monitor it. It also sends the machine's heartbeats, by which rank 0 detects the loss of a machine.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accordion_bench.comm.sealed_store import SealedStore, whole_number

if TYPE_CHECKING:
    from accordion_bench.comm.collectives import Comm  # imports torch, which reports do not need


def growing_pauses(first: float = 0.02, longest: float = 0.5) -> Iterator[None]:
    """Sleep at each `next`, each time 1.5 times as long.

    Args:
        first: first pause in seconds.
        longest: upper bound of a pause in seconds.
    """
    seconds = first
    while True:
        time.sleep(seconds)
        yield
        seconds = min(1.5 * seconds, longest)


BUSY = 0.05  # share of waiting from which it is reported


class Waiting:
    """Time in which the threads of this process computed, and in which they waited for a core; Linux only.

    Attributes:
        before: seconds [computed, waited] in earlier parts of the run, before a resumption.
    """

    def __init__(self) -> None:
        self.before = [0.0, 0.0]
        self._began = _counted()

    def totals(self) -> list[float]:
        """Return the seconds [computed, waited] so far; zeros if the system does not count them."""
        now = _counted()
        return [before + max(n - b, 0.0) for before, n, b in zip(self.before, now, self._began, strict=True)]

    def share(self, comm: "Comm") -> float | None:
        """Return waited / (computed + waited) over all processes of a run. Every process must call it.

        Args:
            comm: communicator of all workers.

        Returns:
            the share; None if the system does not count the times.
        """
        computed, waited = map(sum, zip(*comm.gather_objects(self.totals()), strict=True))
        return waited / (computed + waited) if computed else None

    def worker_state(self, row: int) -> dict[str, Any]:
        """Return the state for checkpoints, with the times in that of the first local worker."""
        return {"waiting_seconds": self.totals() if row == 0 else [0.0, 0.0]}

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Add the times of a `worker_state()`."""
        self.before = [a + b for a, b in zip(self.before, state["waiting_seconds"], strict=True)]


def _counted() -> list[float]:
    """Return the seconds in which the current threads of this process [computed, waited for a core]."""
    found = [0.0, 0.0]
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return found
    for thread in threads:
        try:
            told = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii").split()
            found = [total + int(count) / 1e9 for total, count in zip(found, told[:2], strict=True)]
        except (OSError, ValueError):  # the thread has ended, or the kernel does not count
            continue
    return found


class Neighbours:
    """Processes of a run that one process monitors.

    Args:
        store: store of the run.
        rank: rank of this process.

    Attributes:
        speaks: whether this process sends heartbeats, for its machine or as rank 0.
        pids: process numbers by rank of the monitored processes of this machine; empty until `complete`.
        heard: ranks with monitored heartbeats: one per other machine on rank 0, and rank 0 on those.
        complete: whether all processes have registered.
    """

    def __init__(self, store: SealedStore, rank: int) -> None:
        self.store, self.rank = store, rank
        space = process_space()
        self.host = hashlib.sha256(space.encode()).hexdigest()[:16] if space else f"rank-{rank}"
        self.speaks, self.complete = rank == 0, False
        self.pids: dict[int, int] = {}
        self.heard: list[int] = []
        self._first = False

    def come(self) -> None:
        """Register this process's machine and process number; call it once."""
        number = self.store.add(f"host-{self.host}", 1)
        self.store.set(f"place-{self.host}-{number}", f"{self.rank} {os.getpid()}")
        self._first = number == 1
        if self._first:
            self.store.set(f"speaker-{self.store.add('speakers', 1)}", f"{self.rank} {self.host}")
            self.speaks = True
        if self.rank == 0:
            self.store.set("leader", self.host)

    def settled(self) -> None:
        """Complete the registration, after the first heartbeat; call it once, after `come`."""
        self.store.add("placed", 1)

    def look(self, store: SealedStore) -> bool:
        """Check whether all processes have registered, and then set `pids` and `heard`.

        Args:
            store: store of the run, over the caller's connection.
        """
        if not self.complete and store.add("placed", 0) >= store.processes:
            self._read(store)
        return self.complete

    def _read(self, store: SealedStore) -> None:
        here = min(store.add(f"host-{self.host}", 0), store.processes) if self._first else 1
        places = store.read_all([f"place-{self.host}-{number}" for number in range(1, here + 1)], _place)
        speakers: list[tuple[int, str] | None] | None = []
        if self.rank == 0:
            hosts = min(store.add("speakers", 0), store.processes)
            speakers = store.read_all([f"speaker-{number}" for number in range(1, hosts + 1)], _speaker)
        leaders_host = store.read("leader", str)
        if places is None or speakers is None or leaders_host is None:
            return
        self.pids = {rank: pid for rank, pid in filter(None, places) if rank != self.rank}
        self.heard = [rank for rank, host in filter(None, speakers) if host != self.host]
        if self._first and leaders_host != self.host:
            self.heard = [0]
        self.complete = True

    def gone(self) -> list[int]:
        """Return the ranks in `pids` whose process has ended."""
        return [rank for rank, pid in self.pids.items() if not _alive(pid)]


def process_space() -> str:
    """Return the machine's boot and process namespace, in which process numbers are valid; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True


def _place(text: str) -> tuple[int, int]:
    rank, pid = map(whole_number, text.split(" "))
    return rank, pid


def _speaker(text: str) -> tuple[int, str]:
    rank, _, host = text.partition(" ")
    return whole_number(rank), host
