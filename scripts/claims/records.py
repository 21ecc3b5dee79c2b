"""results/records.csv.xz: every run that was ever counted or chose a rate, including failures; lines are only added."""

import csv
import io
import shlex
from pathlib import Path
from typing import Any

from accordion_bench.locks import locked
from scripts.claims.launch import command
from scripts.claims.outcome import Outcome
from scripts.packed import read_packed, write_packed

FILE = Path("results/records.csv.xz")
JUDGED = ("metric_name", "metric", "selected_by", "best_metric", "test_at_best")
SPENT = ("steps", "payload_bytes", "wire_bytes", "rounds", "seconds", "modelled_seconds")
COLUMNS = (
    *("claim", "table", "phase", "arm", "rate", "seed", "status", "started", "commit", "processor"),
    *JUDGED,
    *SPENT,
    *("run_hash", "command"),
)


def record(found: Outcome, file: Path = FILE) -> None:
    """Add the line of a run that has ended, unless it exists.

    Args:
        found: outcome of a cell; nothing is written if its run has not ended.
        file: file of the records.
    """
    if not found.ended:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.with_suffix(".lock"), wait=True):  # another claim's process would overwrite this line
        if found.hash in recorded(file):
            return
        lines = io.StringIO()
        writer = csv.DictWriter(lines, COLUMNS, lineterminator="\n")
        if not file.is_file():
            writer.writeheader()
        writer.writerow(row(found))
        write_packed(file, (read_packed(file) if file.is_file() else "") + lines.getvalue())


def recorded(file: Path = FILE) -> set[str]:
    """Return the hashes of the runs that have a line."""
    if not file.is_file():
        return set()
    return {row["run_hash"] for row in csv.DictReader(io.StringIO(read_packed(file)))}


def row(found: Outcome) -> dict[str, Any]:
    """Return the line of one run."""
    cell, run = found.cell, found.run
    assert run is not None
    summary, seen = run.summary, run.environment
    return {
        "claim": cell.claim,
        "table": cell.table,
        "phase": cell.phase,
        "arm": cell.arm,
        "rate": f"{cell.rate:g}",
        "seed": cell.seed,
        "status": found.status,
        "started": seen.get("started", ""),
        "commit": seen.get("commit", "")[:12],
        "processor": seen.get("processor", ""),
        **{column: _number(summary.get(column)) for column in (*JUDGED, *SPENT)},
        "run_hash": found.hash,
        "command": shlex.join(["python", *command(cell)]),
    }


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
