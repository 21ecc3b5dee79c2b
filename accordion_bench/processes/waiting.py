"""Waiting: pauses between two looks, what threads have waited for a core, and processes that wait for each other.

The processes of one machine see at once when one of them is gone, and one of them speaks for all (`Neighbours`): the
first process of a machine that has come looks after all others there, and they look after it. It alone sends
heartbeats: a machine that is gone is missed by rank 0, whichever processes it had.
"""

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accordion_bench.comm.sealed_store import SealedStore, whole_number

if TYPE_CHECKING:
    from accordion_bench.comm.collectives import Comm  # imports torch, which reports do without


def growing_pauses(first: float = 0.02, longest: float = 0.5) -> Iterator[None]:
    """Sleep at each `next`, each time half as long again.

    Args:
        first: seconds of the first pause.
        longest: seconds of the last ones.
    """
    seconds = first
    while True:
        time.sleep(seconds)
        yield
        seconds = min(1.5 * seconds, longest)


BUSY = 0.05  # share of the time in which a process could compute, from which on it is told


class Waiting:
    """What the threads of this process have computed, and waited for a core, since it began; Linux only.

    Attributes:
        before: seconds computed and waited in earlier parts of the run.
    """

    def __init__(self) -> None:
        self.before = [0.0, 0.0]
        self._began = _counted()

    def totals(self) -> list[float]:
        """Seconds computed, and seconds waited, so far; zeros where the system does not count them."""
        now = _counted()
        return [before + max(n - b, 0.0) for before, n, b in zip(self.before, now, self._began, strict=True)]

    def share(self, comm: "Comm") -> float | None:
        """The share of the time in which the processes of a run could have computed, and waited; every one calls it.

        Args:
            comm: of all workers.

        Returns:
            None where the system does not count it.
        """
        computed, waited = map(sum, zip(*comm.everyones(self.totals()), strict=True))
        return waited / (computed + waited) if computed else None

    def worker_state(self, row: int) -> dict[str, Any]:
        """For checkpoints; kept by the first local worker."""
        return {"waiting_seconds": self.totals() if row == 0 else [0.0, 0.0]}

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Continue from `worker_state()`."""
        self.before = [a + b for a, b in zip(self.before, state["waiting_seconds"], strict=True)]


def _counted() -> list[float]:
    """Seconds that the threads of this process have computed, and have waited for a core."""
    found = [0.0, 0.0]
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return found
    for thread in threads:
        try:
            told = Path(f"/proc/self/task/{thread}/schedstat").read_text(encoding="ascii").split()
            found = [total + int(count) / 1e9 for total, count in zip(found, told[:2], strict=True)]
        except (OSError, ValueError):  # it has ended, or this kernel does not count
            continue
    return found


class Neighbours:
    """Those of one process of a run.

    Args:
        store: of the run.
        rank: of this process.

    Attributes:
        speaks: whether this process speaks for its machine, or is rank 0: others count on its heartbeat.
        pids: process numbers by rank of those whom this process looks after; empty until all have come.
        heard: ranks to whose heartbeat it listens: rank 0 to all machines, their speakers to rank 0.
        complete: whether all have come.
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
        """Tell where this process is; once."""
        number = self.store.add(f"host-{self.host}", 1)
        self.store.set(f"place-{self.host}-{number}", f"{self.rank} {os.getpid()}")
        self._first = number == 1
        if self._first:
            self.store.set(f"speaker-{self.store.add('speakers', 1)}", f"{self.rank} {self.host}")
            self.speaks = True
        if self.rank == 0:
            self.store.set("leader", self.host)

    def settled(self) -> None:
        """Tell that this process is there, with its first heartbeat; once, after `come`."""
        self.store.add("placed", 1)

    def look(self, store: SealedStore) -> bool:
        """Whether all have come; then `pids` and `heard` are known.

        Args:
            store: of the run, by the caller's own connection.
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
        """Ranks of this machine whose process is no more."""
        return [rank for rank, pid in self.pids.items() if not _alive(pid)]


def process_space() -> str:
    """Where process numbers mean the same: one machine since its start, one namespace; "" where that is not known."""
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
