"""Time to a fixed metric value: `target`, at the first look that found it reached; an epoch's end is one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.intervals import half_width
from accordion_bench.report.compare.link_tables import Beside
from accordion_bench.report.compare.link_tables import tables as measured_tables
from accordion_bench.report.compare.show import NONE, show_bytes
from accordion_bench.report.compare.timed import communicates
from accordion_bench.runs.metrics import Metric, metric, split_of


class Reached(NamedTuple):
    """What an arm has spent until the target, per seed that reached it."""

    seconds: list[float]
    payload: list[float]  # NaN where it is not counted


def target_of(arms: Sequence[Arm]) -> float | None:
    """The target that all runs share, or None; a loop of somebody's own has none of its own."""
    wanted = {run.config.get("target") for arm in arms for run in arm.runs if not run.attached}
    return wanted.pop() if len(wanted) == 1 else None


def clock_of(arms: Sequence[Arm]) -> str:
    """The column that tells time: measured where every arm has communicated, else modelled."""
    return "seconds" if all(map(communicates, arms)) else "modelled_seconds"


def reached(arm: Arm, target: float, column: str) -> Reached:
    """Seconds and payload of the seeds that have reached the target."""
    judged = metric(arm.metric)
    first = [first_row(run.rows, judged, arm.selected_by, target, column) for run in arm.runs]
    rows = [row for row in first if row is not None]
    return Reached([row[column] for row in rows], [_bytes_of(row) for row in rows])


def _bytes_of(row: Mapping[str, Any]) -> float:
    payload = row.get("payload_bytes")
    return math.nan if payload is None else payload


def first_row(
    rows: Sequence[Mapping[str, Any]], judged: Metric, selected_by: str, target: float, column: str
) -> Mapping[str, Any] | None:
    """The first row that reaches the target in the column it goes by, where the time is known."""
    looks = all_looks(rows)
    found = (row for row in looks if row.get(selected_by) is not None and judged.reaches(row[selected_by], target))
    row = next(found, None)
    return row if row is not None and isinstance(row.get(column), int | float) else None


def all_looks(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Looks within an epoch stand in its row, and come before it; its end is one, too."""
    return [look for row in rows for look in [*(row.get("looks") or []), row]]


def to_target(arms: Sequence[Arm]) -> Beside:
    """Time and payload until the target, and the time next to the fastest dense arm."""
    target, column = target_of(arms), clock_of(arms)
    if target is None:
        return Beside("", [[]], "")
    found = [reached(arm, target, column) for arm in arms]
    whole = [mean(of.seconds) for arm, of in zip(arms, found, strict=True) if arm.dense and len(of.seconds) == arm.n]
    dense = min(whole, default=math.nan)
    rows = [["arm", "reached", "time", "of dense", "payload"]]
    for arm, (seconds, payload) in zip(arms, found, strict=True):
        cells = [NONE, NONE, NONE]
        if seconds:
            half = half_width(seconds)
            time = f"{mean(seconds):.3g}" + ("" if math.isnan(half) else f" ± {half:.2g}") + " s"
            share = mean(seconds) / dense
            cells = [time, NONE if math.isnan(share) else f"{share:.2f}", show_bytes(mean(payload))]
        rows.append([arm.label, f"{len(seconds)} of {arm.n}", *cells])
    shown = metric(arms[0].metric).show(target)
    how = "measured" if column == "seconds" else f"modelled on {arms[0].chosen('network') or 'the network'}"
    note = (
        f"Training time, {how}, without evaluation and warm-up, to the {_looks(arms)} that reached {shown} in "
        f"the {split_of(arms[0].selected_by)} split; "
        "means over the seeds that did, with 95 % t-intervals; of dense: over the fastest dense arm, below 1 = faster."
    )
    return Beside(f"Time to {shown}", rows, note)


def _looks(arms: Sequence[Arm]) -> str:
    """When it was looked for."""
    every = {run.config.get("target_every") or 1 for arm in arms for run in arm.runs}
    return "end of the first epoch" if every == {1} else "first look within an epoch, or end of one,"


def beside_tables(arms: Sequence[Arm]) -> list[Beside]:
    """The tables of one setting that stand beside its comparison."""
    return [table for table in (to_target(arms),) if table.heading] + measured_tables(arms)


def mean(values: Sequence[float]) -> float:
    """Of at least one value."""
    return math.fsum(values) / len(values)
