"""Runs that go on: which they are, and how far they have come."""

import os
import time
from dataclasses import replace
from typing import Any

from accordion_bench.report.read.completeness import problem, problem_of_rows
from accordion_bench.report.read.load import METRICS_FILE, Run
from accordion_bench.report.read.rows_file import summary_of

PATIENCE, EPOCHS = 300, 3  # seconds, or epochs of the run, without a new row: then nobody says that it still runs


def is_running(run: Run) -> bool:
    """Whether an unfinished run goes on, as far as its file tells: its last row is young, for epochs as long as its.

    A run that was killed a moment ago counts as running until `PATIENCE` seconds, or `EPOCHS` of its epochs, are over.
    """
    if run.finished or run.last_epoch is None or "stopped_by" in run.summary:
        return False
    try:
        age = time.time() - os.stat(run.path if run.attached else run.path / METRICS_FILE).st_mtime
    except OSError:
        return False
    seconds = run.rows[-1].get("seconds")
    epoch = seconds / len(run.rows) if isinstance(seconds, int | float) else 0.0
    return age < max(PATIENCE, EPOCHS * epoch)


def so_far(run: Run) -> Run:
    """A running run as if its last row were its end; it keeps its problem where its rows are not understood."""
    if run.attached:
        summary = run.summary
        why = problem_of_rows(_ends_now(run, summary), summary, run.rows, run.path.name)
    else:
        summary = summary_of({"workers": run.config.get("workers")}, run.rows)
        why = problem(_ends_now(run, summary), summary, run.rows, done=True)
    return run if why else replace(run, summary=summary, problem="")


def _ends_now(run: Run, summary: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a run that has no more epochs than its rows."""
    return {**run.config, "epochs": summary["epochs"]}


def how_far(run: Run) -> str:
    """`running, epoch 7 of 30`."""
    return f"running, epoch {len(run.rows)} of {run.config.get('epochs', '?')}"
