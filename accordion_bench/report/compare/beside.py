"""Additional tables: time to a target, modelled against measured time, and bytes counted by network interfaces."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from accordion_bench.network.links import link_name, show_link
from accordion_bench.options.units import digits
from accordion_bench.report.compare.arms import Arm, baseline
from accordion_bench.report.compare.intervals import NONE, NOT_SHOWN, difference, half_width, listed, show_bytes
from accordion_bench.report.compare.times import communicates, comparable
from accordion_bench.report.read import Run
from accordion_bench.runs.metrics import Metric, metric, split_of

CLOSE = 0.01  # relative tolerance within which two rates are equal


class TableBeside(NamedTuple):
    """An additional table: heading, rows of cells (headings first, then one row per arm), and a note on the numbers."""

    heading: str
    cells: list[list[str]]
    note: str


def against_model(arms: Sequence[Arm]) -> TableBeside:
    """Compare modelled with measured time, for runs whose `network` describes the link that they used."""
    rows = [["arm", "n", "modelled network", "measured", "modelled", "error"]]
    for arm in arms:
        if arm.values("comm_seconds") and arm.values("modelled_seconds") and all(map(describes_its_link, arm.runs)):
            column = "own_modelled_seconds" if arm.values("own_modelled_seconds") else "modelled_seconds"
            pairs = zip(arm.values(column), arm.values("seconds"), strict=True)
            errors = [100 * (modelled / measured - 1) if measured else math.nan for modelled, measured in pairs]
            seconds = [f"{digits(arm.mean(name))} s" for name in ("seconds", column)]
            rows.append([arm.label, str(arm.n), show_link(arm.config["network"]), *seconds, percent(errors)])
    note = (
        "Both without evaluation and warm-up. The model starts from what this run has computed, and knows nothing of "
        "how long its communication took; error: modelled over measured, minus 1, mean over the seeds."
    )
    return TableBeside("Modelled against measured", rows, note)


def describes_its_link(run: Run) -> bool:
    """Whether a run was modelled on its own link: values given by hand for an interface, or the rate of a netlab."""
    network, lab = run.config.get("network") or {}, run.environment.get("netlab")
    choice = (run.config.get("choices") or {}).get("network")
    by_hand = choice is not None and link_name(run.config) != choice
    if isinstance(lab, dict) and not by_hand:
        rate, slow = lab.get("rate"), [speed for speed in lab.get("slow_host", {}).values() if speed]
        if lab.get("cuts") or network.get("slow_bandwidth") != (min(slow) if slow else None):
            return False
        return isinstance(rate, int | float) and math.isclose(rate, network.get("bandwidth", 0), rel_tol=CLOSE)
    return by_hand and bool((run.config.get("comm") or {}).get("interface"))


def on_the_link(arms: Sequence[Arm]) -> TableBeside:
    """Compare the ledger's bytes with those counted by the interfaces."""
    rows = [["arm", "n", "sent per worker", "control", "sent by the interface", "counted over sent + control"]]
    for arm in arms:
        if counted := arm.values("link_sent_bytes"):
            wire = arm.values("wire_bytes") or [math.nan] * arm.n
            known = zip(wire, arm.values("control_wire_bytes"), strict=True)
            ratios = [sent / sum(own) if sum(own) else math.nan for sent, own in zip(counted, known, strict=True)]
            columns = ("wire_bytes", "control_wire_bytes", "link_sent_bytes")
            sizes = [show_bytes(arm.mean(column)) for column in columns]
            ratio = math.fsum(ratios) / len(ratios)
            rows.append([arm.label, str(arm.n), *sizes, NONE if math.isnan(ratio) else f"{ratio:.3f}"])
    note = (
        "Bytes of one worker, by arithmetic, control without checksums; of one interface, mean over the processes, as "
        "the operating system counts them in training: with headers, acknowledgements, checksums of the run and all "
        "else that has used it; without what NCCL sends over NVLink, shared memory, InfiniBand or RoCE."
    )
    return TableBeside("Bytes on the link", rows, note)


def percent(errors: Sequence[float]) -> str:
    """Format the mean error: `-3.2 %`, over several seeds `-3.2 ± 1.1 %`."""
    half = half_width(errors)
    return f"{math.fsum(errors) / len(errors):+.1f}" + ("" if math.isnan(half) else f" ± {half:.1f}") + " %"


class Reached(NamedTuple):
    """Time and payload until the target, one value per seed that reached it; NaN if unknown."""

    seconds: list[float]
    payload: list[float]

    @property
    def timed(self) -> list[float]:
        """Seconds, if they are known for all these seeds; else []."""
        return [] if any(map(math.isnan, self.seconds)) else self.seconds

    @property
    def untimed(self) -> str:
        """Text shown in place of a time."""
        return "time not known" if self.seconds else "not reached"


class TargetTimes(NamedTuple):
    """Arms with the target that all their runs share.

    target: value of the metric.
    column: column of times: measured if every arm has measured communication, else modelled.
    shown: the target in words.
    arms: time and payload of each arm.
    """

    target: float
    column: str
    shown: str
    arms: list[Reached]

    @property
    def how(self) -> str:
        return "measured" if self.column == "seconds" else "modelled"

    @property
    def drawn(self) -> bool:
        """Whether a figure has anything to compare."""
        return len(self.arms) > 1 and any(own.timed for own in self.arms)


def race(arms: Sequence[Arm]) -> TargetTimes | None:
    """Return time and payload of all arms until their target; None if the runs have no common target.

    A user's own loop has no target and takes that of the others.
    """
    wanted = {run.config.get("target") for arm in arms for run in arm.runs if not run.attached}
    target = wanted.pop() if len(wanted) == 1 else None
    if target is None:
        return None
    column = "seconds" if all(map(communicates, arms)) else "modelled_seconds"
    shown = metric(arms[0].metric).show(target)
    return TargetTimes(target, column, shown, [reached(arm, target, column) for arm in arms])


def reached(arm: Arm, target: float, column: str) -> Reached:
    """Return seconds and payload of the seeds that have reached the target."""
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
    """Return the first evaluation that reaches the target in the column `selected_by`; None if none does."""
    looks = all_looks(rows)
    found = (row for row in looks if row.get(selected_by) is not None and judged.reaches(row[selected_by], target))
    return next(found, None)


def all_looks(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return all evaluations in order; those within an epoch, stored in its row, precede the one at its end."""
    return [look for row in rows for look in [*(row.get("looks") or []), row]]


def to_target(arms: Sequence[Arm]) -> TableBeside:
    """Compare time and payload until the target, and time relative to the dense arm; no rows without a target."""
    if (ways := race(arms)) is None:
        return TableBeside("", [], "")
    found = dict(zip([arm.label for arm in arms], ways.arms, strict=True))
    rows = [["arm", "reached", "time", "of dense", "payload"]]
    for arm in arms:
        own, time, share = found[arm.label], NONE, NONE
        if own.timed:
            half = half_width(own.timed)
            time = digits(mean(own.timed)) + ("" if math.isnan(half) else f" ± {digits(half, 2)}") + " s"
            share = _of_dense(arm, baseline(arm, arms), found, ways.column)
        payload = show_bytes(mean(own.payload)) if own.payload else NONE
        rows.append([arm.label, f"{len(own.seconds)} of {arm.n}", time, share, payload])
    networks = list(dict.fromkeys(arm.named("network") or "the network" for arm in arms))
    how = ways.how + ("" if ways.how == "measured" else f" on {listed(networks)}")
    note = (
        f"Training time, {how}, without evaluation and warm-up, to the {first_look(arms)} that reached {ways.shown} in "
        f"the {split_of(arms[0].selected_by)} split; "
        "means over the seeds that did, with 95 % t-intervals; of dense: over the dense arm that an arm is compared "
        "with, where all its seeds did and the times compare; below 1 = faster."
    )
    return TableBeside(f"Time to {ways.shown}", rows, note)


def _of_dense(arm: Arm, dense: Arm | None, found: Mapping[str, Reached], column: str) -> str:
    """Return the time relative to the dense arm, all of whose seeds must have reached the target."""
    if dense is None or len(found[dense.label].timed) < dense.n or not comparable(arm, dense, column):
        return NONE
    own, theirs = found[arm.label].timed, found[dense.label].timed
    if arm is not dense and difference(own, theirs).shown is False:
        return NOT_SHOWN
    return f"{mean(own) / mean(theirs):.2f}" if mean(theirs) else NONE


def first_look(arms: Sequence[Arm]) -> str:
    """Describe when the metric was compared with the target."""
    every = {run.config.get("target_every") or 1 for arm in arms for run in arm.runs}
    return "end of the first epoch" if every == {1} else "first look within an epoch, or end of one,"


def beside_tables(arms: Sequence[Arm]) -> list[TableBeside]:
    """Return the additional tables of one setting that have at least one row."""
    every = (to_target(arms), against_model(arms), on_the_link(arms))
    return [table for table in every if len(table.cells) > 1]


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    return math.fsum(values) / len(values)
