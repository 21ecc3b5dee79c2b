"""Runs cells, several at once, until the time is up; what still runs then saves its state and goes on next time."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from scripts.claims.outcome import Outcome, outcome
from scripts.claims.plan import Cell


@dataclass(frozen=True)
class Budget:
    """What a call may use.

    Args:
        jobs: runs at once, one thread each.
        deadline: on `time.monotonic`, in seconds.
    """

    jobs: int
    deadline: float

    @property
    def over(self) -> bool:
        return time.monotonic() > self.deadline


def command(cell: Cell) -> list[str]:
    """What is typed for a cell, after `python` and from the repository's root."""
    typed = [*cell.overrides, f"paths.runs={cell.folder}", "resume_sweep=true", "hydra.mode=RUN"]
    return ["-m", "accordion_bench.netlab", *cell.lab, "--", *typed] if cell.lab else ["-m", "accordion_bench", *typed]


def run(cells: Iterable[Cell], data: str, budget: Budget, tell: Callable[[Outcome], None]) -> None:
    """Start what has not ended, in the order given.

    Args:
        cells: planned.
        data: folder of the data sets.
        budget: time and processes.
        tell: called with each outcome as it ends.
    """
    waiting = iter(cell for cell in cells if not outcome(cell).ended)
    active: dict[subprocess.Popen[bytes], Cell] = {}
    try:
        while not budget.over:
            for cell in _next(waiting, budget.jobs - len(active)):
                active[_start(cell, data)] = cell
            if not active:
                return
            for process in [process for process in active if process.poll() is not None]:
                _ended(process, active.pop(process), tell)
            time.sleep(0.2)
    finally:  # time is up, or Ctrl-C, which the runs have got themselves
        for process in active:
            process.send_signal(signal.SIGTERM)
        for process, cell in active.items():
            _ended(process, cell, tell)


def _next(waiting: Iterator[Cell], count: int) -> Iterator[Cell]:
    for _, cell in zip(range(count), waiting, strict=False):
        yield cell


def _start(cell: Cell, data: str) -> subprocess.Popen[bytes]:
    typed = [sys.executable, *command(cell), f"paths.data={data}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(typed, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def _ended(process: subprocess.Popen[bytes], cell: Cell, tell: Callable[[Outcome], None]) -> None:
    lines = process.communicate()[1].decode(errors="replace").strip().splitlines()
    found = outcome(cell)
    print(f"{cell.name}: {found.status}" + _why(found, lines), flush=True)
    tell(found)


def _why(found: Outcome, lines: list[str]) -> str:
    if found.status == "done" and found.run is not None:
        summary = found.run.summary
        return f", {summary['metric_name']} {summary['metric']:.4g} in {summary['seconds']:.0f} s of training"
    return f": {lines[-1]}" if lines else ""
