"""python -m scripts.claims CLAIM: runs what is missing of a claim, within a time, and goes on there next time.

    python -m scripts.claims gpt --data DATA --minutes 60     # run, record, archive
    python -m scripts.claims gpt --minutes 0                  # no runs: tables and figures from what there is
    python -m scripts.claims gpt --minutes 0 --figures FOLDER # all figures, also those that no page shows

Rates come first: each arm of a table is tried at the same few learning rates with a seed that is never counted. Then
follow the seeds that count, each arm at the rate that ended best in the validation split, and then the schedules with
the bytes of an arm.
"""

import argparse
import itertools
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from accordion_bench.report.__main__ import main as write_report
from scripts.claims import archive, records
from scripts.claims.curve import write_curve
from scripts.claims.kept import keep_shown
from scripts.claims.launch import Budget, run
from scripts.claims.outcome import Outcome, outcome, rates_of
from scripts.claims.plan import Cell, Plan, Table, names, read_plan
from scripts.claims.same_bytes import same_bytes_cells
from scripts.claims.summary import write_summary
from scripts.claims.tables import write_rates
from scripts.claims.to_target import write_to_target
from scripts.claims.windows import write_windows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        "scripts.claims", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("claim", choices=names())
    parser.add_argument("--data", default="data", help="folder with cifar-10-batches-py and wikitext-2 (%(default)s)")
    parser.add_argument("--minutes", type=float, default=60, help="for the runs (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each (%(default)s)")
    parser.add_argument("--tables", nargs="+", metavar="TABLE", help="some of the claim's, in this order; else all")
    parser.add_argument(
        "--figures", type=Path, metavar="FOLDER", help="reports and all figures there, nothing kept here"
    )
    parser.add_argument("--dry", action="store_true", help="list what is missing, run nothing")
    typed = parser.parse_args()
    if typed.jobs < 1:
        raise SystemExit(f"--jobs must be a number of at least 1, got {typed.jobs}")
    plan = read_plan(typed.claim)
    chosen = [plan.table(name) for name in typed.tables] if typed.tables else plan.tables
    archive.unpack(plan.claim)
    stop_on_signals()
    deadline = time.monotonic() + 60 * typed.minutes
    if typed.dry:
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # --dry | head
        for table in chosen:
            for cell in planned(plan, table):
                print(f"{cell.name}: {outcome(cell).status}")
        return
    for table in chosen:
        jobs = 1 if table.lab else typed.jobs  # hosts share the processors already
        budget = Budget(jobs, deadline)
        run(plan.tune_cells(table), typed.data, budget, records.record)
        run(plan.count_cells(table, rates_of(plan, table)), typed.data, budget, records.record)
        run(same_bytes_cells(plan, table, rates_of(plan, table)), typed.data, budget, records.record)
    finish(plan, chosen, typed.figures)


def stop_on_signals() -> None:
    """Ctrl-C and SIGTERM end the runs, which save their states; a shell lets nothing of its background hear Ctrl-C."""

    def stop(signum: int, _: Any) -> None:
        raise SystemExit(128 + signum)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)


def planned(plan: Plan, table: Table) -> list[Cell]:
    """Return all runs of a table that can be determined so far."""
    rates = rates_of(plan, table)
    return [*plan.tune_cells(table), *plan.count_cells(table, rates), *same_bytes_cells(plan, table, rates)]


def finish(plan: Plan, tables: Sequence[Table], figures: Path | None = None) -> None:
    """Report the completed runs of some tables; also record and archive them if the reports are stored.

    Args:
        plan, tables: claim and tables.
        figures: a folder for reports with every figure; None = results/claims, which keeps only the figures that the
            claim's page shows.
    """
    found = {table.name: list(map(outcome, planned(plan, table))) for table in tables}
    if figures is None:
        for one in itertools.chain.from_iterable(found.values()):
            records.record(one)
        archive.pack(plan.claim)
    kept = archive.archive_of(plan.claim).parent
    for table in tables:
        report(plan, table, found[table.name], (figures or kept) / table.name)
    if records.FILE.is_file():
        write_curve(plan, pd.read_csv(records.FILE), figures or kept)
    if figures is None:
        keep_shown(kept)


def report(plan: Plan, table: Table, outcomes: Sequence[Outcome], out: Path) -> None:
    """Write the table's report from the runs that count, its rates, and its summary if there are several seeds.

    Earlier figures are deleted first: a report names figures by its settings, and would leave those of settings that no
    longer exist. Schedules that differ per seed are in the summary only, because in a report each of their seeds is a
    separate arm.

    Args:
        plan, table, outcomes: claim, table and runs of the report.
        out: folder of the table.
    """
    counted = [found.cell for found in outcomes if found.status == "done" and found.cell.phase == "count"]
    if counted:
        for figure in out.glob("*.png"):
            figure.unlink()
        folders = [str(cell.folder) for cell in counted if cell.arm not in table.drawn_arms]
        write_report([*folders, "--out", str(out), "--formats", "md,csv"])
    if any(found.ended for found in outcomes):
        out.mkdir(parents=True, exist_ok=True)
        write_rates(table, outcomes, rates_of(plan, table), out / "rates.md")
    if counted and len(table.seeds) > 1 and not table.lab:
        every = pd.read_csv(records.FILE)
        write_summary(plan, table, every, out)
        write_windows(table, outcomes, out)
        write_to_target(plan, table, outcomes, every, out)


if __name__ == "__main__":
    main()
