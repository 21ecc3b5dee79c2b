"""Time to a fixed metric value: `target`, at the first look that found it reached; an epoch's end is one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from accordion_bench.options.units import digits
from accordion_bench.report.compare.arms import Arm, baseline
from accordion_bench.report.compare.intervals import difference, half_width
from accordion_bench.report.compare.link_tables import Beside
from accordion_bench.report.compare.link_tables import tables as measured_tables
from accordion_bench.report.compare.show import NO_DIFFERENCE, NONE, listed, show_bytes
from accordion_bench.report.compare.timed import communicates, comparable
from accordion_bench.runs.metrics import Metric, metric, split_of


class Reached(NamedTuple):
    """What an arm has spent until the target, per seed that reached it; NaN where that is not known."""

    seconds: list[float]
    payload: list[float]

    @property
    def timed(self) -> list[float]:
        """Seconds, where those of all these seeds are known."""
        return [] if any(map(math.isnan, self.seconds)) else self.seconds

    @property
    def untimed(self) -> str:
        """What stands where there is no time."""
        return "time not known" if self.seconds else "not reached"


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
    first = [first_row(run.rows, judged, arm.selected_by, target) for run in arm.runs]
    rows = [row for row in first if row is not None]
    return Reached([_spent(row, column) for row in rows], [_spent(row, "payload_bytes") for row in rows])


def _spent(row: Mapping[str, Any], column: str) -> float:
    spent = row.get(column)
    return spent if isinstance(spent, int | float) else math.nan


def first_row(
    rows: Sequence[Mapping[str, Any]], judged: Metric, selected_by: str, target: float
) -> Mapping[str, Any] | None:
    """The first row that reaches the target in the column it goes by."""
    looks = all_looks(rows)
    found = (row for row in looks if row.get(selected_by) is not None and judged.reaches(row[selected_by], target))
    return next(found, None)


def all_looks(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Looks within an epoch stand in its row, and come before it; its end is one, too."""
    return [look for row in rows for look in [*(row.get("looks") or []), row]]


def to_target(arms: Sequence[Arm]) -> Beside:
    """Time and payload until the target, and the time next to that of its dense arm."""
    target, column = target_of(arms), clock_of(arms)
    if target is None:
        return Beside("", [[]], "")
    found = {arm.label: reached(arm, target, column) for arm in arms}
    rows = [["arm", "reached", "time", "of dense", "payload"]]
    for arm in arms:
        own, time, share = found[arm.label], NONE, NONE
        if own.timed:
            half = half_width(own.timed)
            time = digits(mean(own.timed)) + ("" if math.isnan(half) else f" ± {digits(half, 2)}") + " s"
            share = _of_dense(arm, baseline(arm, arms), found, column)
        payload = show_bytes(mean(own.payload)) if own.payload else NONE
        rows.append([arm.label, f"{len(own.seconds)} of {arm.n}", time, share, payload])
    shown = metric(arms[0].metric).show(target)
    networks = list(dict.fromkeys(arm.named("network") or "the network" for arm in arms))
    how = "measured" if column == "seconds" else f"modelled on {listed(networks)}"
    note = (
        f"Training time, {how}, without evaluation and warm-up, to the {first_look(arms)} that reached {shown} in "
        f"the {split_of(arms[0].selected_by)} split; "
        "means over the seeds that did, with 95 % t-intervals; of dense: over the dense arm that an arm is compared "
        "with, where all its seeds did and the times compare; below 1 = faster."
    )
    return Beside(f"Time to {shown}", rows, note)


def _of_dense(arm: Arm, dense: Arm | None, found: Mapping[str, Reached], column: str) -> str:
    """The time over that of its dense arm, which all seeds of that must have reached."""
    if dense is None or len(found[dense.label].timed) < dense.n or not comparable(arm, dense, column):
        return NONE
    own, theirs = found[arm.label].timed, found[dense.label].timed
    if arm is not dense and difference(own, theirs).shown is False:
        return NO_DIFFERENCE
    return f"{mean(own) / mean(theirs):.2f}" if mean(theirs) else NONE


def first_look(arms: Sequence[Arm]) -> str:
    """When it was looked for."""
    every = {run.config.get("target_every") or 1 for arm in arms for run in arm.runs}
    return "end of the first epoch" if every == {1} else "first look within an epoch, or end of one,"


def beside_tables(arms: Sequence[Arm]) -> list[Beside]:
    """The tables of one setting that stand beside its comparison."""
    return [table for table in (to_target(arms),) if table.heading] + measured_tables(arms)


def mean(values: Sequence[float]) -> float:
    """Of at least one value."""
    return math.fsum(values) / len(values)
