"""Runs that go on: which they are, how far they have come, and the page on which they are curves beside the others."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.grouping import group
from accordion_bench.report.read.find import METRICS_FILE
from accordion_bench.report.read.load import Run
from accordion_bench.report.read.rows_file import summary_of
from accordion_bench.report.read.schema import problem, problem_of_rows
from accordion_bench.report.render.page import Section, page
from accordion_bench.report.render.write import left_out, sound, texts

PATIENCE, EPOCHS = 300, 3  # seconds, or epochs of the run, without a new row: then it is not said to be running


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


def arm_so_far(run: Run) -> Arm | None:
    """A running run as an arm of its own, which says how far it is; None where its rows are not understood.

    Args:
        run: for which `is_running`.
    """
    try:
        arms, _ = group([so_far(run)])
    except Exception:  # of a stranger's run: it must not end the report of the others
        return None
    return replace(arms[0], label=f"{arms[0].label}, seed {run.seed}: {how_far(run)}") if arms else None


def beside(parts: Sequence[Sequence[Arm]], running: Sequence[Arm]) -> list[list[Arm]]:
    """The running arms of each setting; those of settings in which nothing has finished, after them, each its own.

    Args:
        parts: the finished arms of each setting.
        running: one per run, see `arm_so_far`.
    """
    doors = [_doors(arms[0]) for arms in parts]
    found: list[list[Arm]] = [[] for _ in parts]
    for arm in running:
        home = next((i for i, door in enumerate(doors) if door & _doors(arm)), len(doors))
        if home == len(doors):
            doors.append(_doors(arm))
            found.append([])
        found[home].append(arm)
    return found


def _doors(arm: Arm) -> set[tuple[str, ...]]:
    """What leads into the setting of an arm."""
    return set(map(tuple, json.loads(arm.setting)))


def live_page(
    ended: Sequence[Run], running: Sequence[Run], folders: Sequence[tuple[str, str]] = (), follow: str = ""
) -> str:
    """The page as one HTML text, without the figures that are drawn for papers: they take longest.

    Args:
        ended: finished runs, and unfinished ones that go on no more.
        running: those that go on.
        folders: names of those without a run, and why; see `find.no_runs`.
        follow: the script by which the page follows its runs.
    """
    ended, parts, repeats, _ = sound(ended, texts)
    absent = left_out(ended, repeats, folders)
    if running:
        lines = [f"{run.name} ({run.label}, seed {run.seed}): {how_far(run)}" for run in running]
        absent = {"Running, in no mean": lines, **absent}
    curves = beside(parts, [arm for run in running if (arm := arm_so_far(run))])
    sections = [Section(arms, [], others) for arms, others in zip_longest(parts, curves, fillvalue=())]
    return page(sections, [], absent, follow)
