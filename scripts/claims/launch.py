"""Run cells, several at once, until the time is over; active runs then save their states for the next call."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, NamedTuple

from scripts.claims.outcome import Outcome, outcome
from scripts.claims.plan import Cell


@dataclass(frozen=True)
class Budget:
    """Limits of a call.

    Args:
        jobs: number of concurrent runs, one thread each.
        deadline: end of the call on `time.monotonic`, in seconds.
    """

    jobs: int
    deadline: float

    @property
    def over(self) -> bool:
        return time.monotonic() > self.deadline


class Started(NamedTuple):
    """A run's process, and the file of its output."""

    process: subprocess.Popen[bytes]
    said: IO[bytes]


def command(cell: Cell) -> list[str]:
    """Return the command of a cell, after `python` and from the repository's root."""
    typed = [*cell.overrides, f"paths.runs={cell.folder}", "resume_sweep=true", "hydra.mode=RUN"]
    return ["-m", "accordion_bench.netlab", *cell.lab, "--", *typed] if cell.lab else ["-m", "accordion_bench", *typed]


def run(cells: Iterable[Cell], data: str, budget: Budget, tell: Callable[[Outcome], None]) -> None:
    """Start the runs that have not ended, in the given order.

    Args:
        cells: planned cells.
        data: folder of the data sets.
        budget: time and number of processes.
        tell: function that is called with each outcome as it ends.
    """
    waiting = iter(cell for cell in cells if not outcome(cell).ended)
    active: dict[Started, Cell] = {}
    with contextlib.ExitStack() as files:
        try:
            while not budget.over:
                for cell in _next(waiting, budget.jobs - len(active)):
                    # a pipe would be full, and the run would wait, before anybody reads it
                    active[_start(cell, data, files.enter_context(tempfile.TemporaryFile()))] = cell
                if not active:
                    return
                for started in [started for started in active if started.process.poll() is not None]:
                    _ended(started, active.pop(started), tell)
                time.sleep(0.2)
        finally:  # time is up, or Ctrl-C, which the runs have got themselves
            for started in active:
                started.process.send_signal(signal.SIGTERM)
            for started, cell in active.items():
                _ended(started, cell, tell)


def _next(waiting: Iterator[Cell], count: int) -> Iterator[Cell]:
    for _, cell in zip(range(count), waiting, strict=False):
        yield cell


def _start(cell: Cell, data: str, said: IO[bytes]) -> Started:
    typed = [sys.executable, *command(cell), f"paths.data={data}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return Started(subprocess.Popen(typed, stdout=subprocess.DEVNULL, stderr=said, env=environment), said)


def _ended(started: Started, cell: Cell, tell: Callable[[Outcome], None]) -> None:
    started.process.wait()
    with started.said as said:
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    found = outcome(cell)
    print(f"{cell.name}: {found.status}" + _why(found, lines), flush=True)
    tell(found)


def _why(found: Outcome, lines: list[str]) -> str:
    if found.status == "done" and found.run is not None:
        summary = found.run.summary
        return f", {summary['metric_name']} {summary['metric']:.4g} in {summary['seconds']:.0f} s of training"
    return f": {lines[-1]}" if lines else ""
