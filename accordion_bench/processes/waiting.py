"""How long a process has waited for a processor core: on a busy machine its steps take longer than they need."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accordion_bench.comm.collectives import Comm  # imports torch, which reports do without

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
