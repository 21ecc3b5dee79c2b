"""Outcome of a cell: its run folder, its metric, and the best rate."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from accordion_bench.report.read import Run, find_runs, read_run
from accordion_bench.runs.metrics import metric
from scripts.claims.plan import Cell, Plan, Table

DIVERGED = "NonFinite"


def has_ended(run: Run) -> bool:
    """Whether a run is done or has diverged."""
    return run.finished or has_diverged(run)


def has_diverged(run: Run) -> bool:
    """Whether a run has stopped at a non-finite loss, or has finished with a non-finite metric."""
    value = run.summary.get("metric")
    return run.summary.get("stopped_by") == DIVERGED or (isinstance(value, float) and not math.isfinite(value))


@dataclass(frozen=True)
class Outcome:
    """A cell and its most advanced run; None = not started."""

    cell: Cell
    run: Run | None

    @property
    def status(self) -> str:
        """`done`, `diverged`, `unfinished`, or `not started`."""
        if self.run is None:
            return "not started"
        if self.run.finished:
            return "done"
        return "diverged" if has_diverged(self.run) else "unfinished"

    @property
    def ended(self) -> bool:
        """Whether another start would have no effect."""
        return self.run is not None and has_ended(self.run)

    @property
    def chosen_by(self) -> float:
        """Metric after the last epoch of a completed run, of the validation split if there is one."""
        assert self.run is not None
        summary = self.run.summary
        return float(summary.get(summary.get("selected_by", ""), summary["metric"]))

    @property
    def hash(self) -> str:
        """Hash of the run's metrics, or of its cell's name if it has none; it identifies the run."""
        if self.run is None:
            return ""
        file = self.run.path / "metrics.jsonl"
        rows = file.read_bytes() if file.is_file() else b""
        return hashlib.sha256(rows or self.cell.folder.as_posix().encode()).hexdigest()[:16]


def outcome(cell: Cell, root: Path = Path()) -> Outcome:
    """Read a cell's folder.

    Args:
        cell: planned cell.
        root: folder to which the cell's folder is relative.
    """
    found = [read_run(path) for path in find_runs([root / cell.folder])] if (root / cell.folder).is_dir() else []
    return Outcome(cell, max(found, key=lambda run: (run.finished, len(run.rows)), default=None))


def best_rates(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """Return the learning rate of each arm whose tuning run ended best, by the validation split.

    An arm is included if all its tuning runs have ended, at least one of them with a metric.
    """
    by_arm: dict[str, list[Outcome]] = {}
    for one in outcomes:
        by_arm.setdefault(one.cell.arm, []).append(one)
    chosen = {}
    for arm, tried in by_arm.items():
        scores = {one.cell.rate: one.chosen_by for one in tried if one.status == "done"}
        if not scores or not all(one.ended for one in tried):
            continue
        judged = metric(next(one.run.summary["metric_name"] for one in tried if one.run and one.status == "done"))
        best = max if judged.higher_is_better else min
        chosen[arm] = best(scores, key=lambda rate: scores[rate])
    return chosen


def rates_of(plan: Plan, table: Table) -> dict[str, float]:
    """Return the rate of each arm of a table, as far as it was chosen."""
    source = plan.table(table.rates_from) if table.rates_from is not None else table
    if not source.tunes:
        return {arm: source.grid(arm)[0] for arm in source.arms}
    return best_rates(map(outcome, plan.tune_cells(source)))


def runs_by_arm(outcomes: Sequence[Outcome]) -> dict[str, dict[int, Run]]:
    """Return arm -> seed -> run, of those that count and are done."""
    done: dict[str, dict[int, Run]] = {}
    for found in outcomes:
        if found.cell.phase == "count" and found.status == "done" and found.run is not None:
            done.setdefault(found.cell.arm, {})[found.cell.seed] = found.run
    return done
