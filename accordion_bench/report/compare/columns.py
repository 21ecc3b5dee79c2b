"""Columns of the comparison, each declared once: its value in table.csv and its formatting everywhere else.

Text tables (table.md, table.tex) have units and ratios in the cells. The page has units in the headings and a note next
to each number. A terminal has room for five columns. `PLACES` lists the columns of each place, in order.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from accordion_bench.report.compare.arms import Arm, baseline
from accordion_bench.report.compare.intervals import (
    NONE,
    NOT_COUNTED,
    NOT_SHOWN,
    Row,
    against,
    difference,
    half_width,
    if_known,
    show_bytes,
    show_difference,
    show_floats,
    show_ratio,
    show_seconds,
    show_times,
    show_value,
    signed,
    size,
    standard_error,
    three_digits,
)
from accordion_bench.report.compare.times import comparable
from accordion_bench.runs.metrics import Metric, metric, split_of

BYTES = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}
COUNTS = {"billions": 1e9, "millions": 1e6, "thousands": 1e3, "": 1.0}
JUDGED, GAP, BEST = "JUDGED", "GAP", "BEST"  # placeholders of columns whose keys contain the name of the metric
PLACES = {
    "table": "arm n JUDGED BEST GAP payload_bytes wire_bytes seconds exposed_seconds comm_seconds modelled_seconds "
    "modelled_comm_seconds rounds paper_floats",
    "paper": "arm n JUDGED GAP payload_bytes seconds modelled_seconds paper_floats",
    "page": "n JUDGED GAP BEST wire_bytes payload_bytes link_sent_bytes rounds paper_floats seconds modelled_seconds "
    "exposed_seconds comm_seconds modelled_comm_seconds seeds batch_size network baseline",
    "terminal": "JUDGED GAP wire_bytes seconds modelled_seconds n",
}
OFTEN = (JUDGED, GAP, "n", "wire_bytes", "seconds", "modelled_seconds")  # the page shows other columns on request


def _nothing(row: Row) -> str:
    return ""


@dataclass(frozen=True)
class Column:
    """One column of the comparison.

    Args:
        key: name in table.csv.
        value: function that returns the value in table.csv of an arm, given its dense baseline; None = the mean over
            the seeds of summary.json's entry `key`.
        heading: heading in words; "" = only in table.csv.
        unit: unit of the numbers on the page; "" = none.
        show: function that formats a number on the page, without unit.
        note: function that returns the note next to the number on the page: its interval or ratio to dense.
        cell: function that formats a row's cell in a text table: number, unit, interval and ratio.
        brief: function that formats a row's cell on a terminal.
        headings: headings by place, where they differ from `heading`.
        scales: units and their sizes; the page selects the one in which the median number is at least 1.
        unknown: text on the page for a missing number.
    """

    key: str
    value: Callable[[Arm, Arm | None], Any] | None = None
    heading: str = ""
    unit: str = ""
    show: Callable[[Any], str] = str
    note: Callable[[Row], str] = _nothing
    cell: Callable[[Row], str] = _nothing
    brief: Callable[[Row], str] = _nothing
    headings: Mapping[str, str] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)
    unknown: str = NONE

    def of(self, arm: Arm, dense: Arm | None) -> Any:
        """Return the value in table.csv."""
        return arm.mean(self.key) if self.value is None else self.value(arm, dense)

    def headed(self, place: str) -> str:
        """Return the heading in one of PLACES."""
        return self.headings.get(place, self.heading)

    def scaled(self, numbers: Sequence[float]) -> "Column":
        """Return the column in the unit in which the median of the numbers is at least 1."""
        values = sorted(number for number in numbers if not math.isnan(number)) if self.scales else []
        middle = values[len(values) // 2] if values else 0
        unit, factor = next(((unit, size) for unit, size in self.scales.items() if middle >= size), (self.unit, 1.0))
        return replace(self, unit=unit, show=lambda value: self.show(value / factor)) if self.scales else self


def tidy(arms: Sequence[Arm]) -> pd.DataFrame:
    """Return one row per arm with numbers only, the content of table.csv.

    Columns of the metric contain its name: `accuracy` (a share in [0, 1]), `accuracy_ci95`, ..., or `perplexity`,
    `perplexity_ci95`, ...; `metric` gives the name. Comparisons with dense refer to the arm named in `baseline`, and
    are empty without one; `*_times_less` below 1 means MORE than dense. Payload, wire and rounds are empty if a
    third-party hook sends uncounted bytes; `link_sent_bytes` is counted by the interfaces.
    """
    pairs = [(arm, baseline(arm, arms)) for arm in arms]
    return pd.DataFrame([{own.key: own.of(*pair) for own in columns(pair[0].metric)} for pair in pairs])


def shown(table: pd.DataFrame, place: str) -> dict[str, Column]:
    """Return the columns of `place`, one of PLACES, in order and keyed as there, for a setting's `tidy` table."""
    judged = metric(table["metric"].iloc[0])
    best, heading = best_column(table)
    found = {own.key: own for own in columns(judged.name)}
    found |= {JUDGED: found[judged.name], GAP: found[f"{judged.name}_minus_dense"]}
    found[BEST] = replace(found[best], heading=f"{judged.words}, {heading}", headings={"table": heading})
    return {name: found[name] for name in PLACES[place].split()}


@functools.cache
def columns(name: str) -> tuple[Column, ...]:
    """Return all columns for the metric `name`, in the order of table.csv."""
    judged = metric(name)
    return (
        Column("model", lambda arm, _: arm.named("model")),
        Column("dataset", lambda arm, _: arm.named("dataset")),
        Column("workers", lambda arm, _: arm.workers),
        Column("batch_size", lambda arm, _: arm.batch_each, "batch size"),
        Column("epochs", lambda arm, _: arm.config["epochs"]),
        Column("scale", lambda arm, _: arm.scale),
        Column("experiment", lambda arm, _: arm.chosen("experiment")),
        Column("arm", lambda arm, _: arm.label, "arm", cell=lambda row: row["arm"]),
        Column(
            "n", lambda arm, _: arm.n, "n", "seeds", cell=lambda row: str(row["n"]), brief=lambda row: str(row["n"])
        ),
        Column("seeds", lambda arm, _: " ".join(map(str, arm.seeds)), "seeds"),
        Column("metric", lambda arm, _: arm.metric),
        *_judged(judged),
        _volume("payload", "payload"),
        Column("payload_times_less", _times_less("payload_bytes")),
        _volume("wire", "sent per worker"),
        Column("wire_times_less", _times_less("wire_bytes")),
        Column(
            "link_sent_bytes", heading="sent by the interface", show=three_digits, scales=BYTES, unknown=NOT_COUNTED
        ),
        Column(
            "rounds",
            heading="rounds",
            show=three_digits,
            note=lambda row: _against_dense(row, show_times(row["rounds_times_less"])),
            cell=lambda row: if_known(row["rounds"], "{:,.0f}"),
            scales=COUNTS,
        ),
        Column("rounds_times_less", _times_less("rounds")),
        Column(
            "paper_floats",
            heading="paper's count of floats",
            show=three_digits,
            cell=_paper_count,
            headings={"table": "paper's count", "paper": "paper's count"},
            scales=COUNTS,
        ),
        *_timed("seconds", "time"),
        _seconds("exposed_seconds", "exchange"),
        _seconds("comm_seconds", "communication"),
        *_against_time("seconds"),
        Column("network", lambda arm, _: arm.named("network"), "modelled network"),
        *_timed("modelled_seconds", "modelled time"),
        _seconds("modelled_comm_seconds", "modelled communication", "modelled comm."),
        *_against_time("modelled_seconds"),
        Column("simulated_seconds"),
        Column("baseline", lambda _, dense: dense.label if dense else "", "against"),
    )


# ---- the metric


def _judged(judged: Metric) -> list[Column]:
    """Return the columns of mean, interval, deviation and best over the seeds, and of the difference to dense."""
    name, points = judged.name, judged.points if judged.percent else ""

    def show(value: float) -> str:
        return f"{judged.scaled(value):.2f}" if judged.percent else judged.show(value)

    def with_half(row: Row) -> str:
        return show_value(judged, row[name], row[f"{name}_ci95"])

    def best(key: str, column: str) -> Column:
        def cell(row: Row) -> str:
            return show_value(judged, row[key])

        return Column(key, lambda arm, _: arm.mean(column), unit=judged.unit, show=show, cell=cell)

    def gap(row: Row) -> str:
        """Return the difference to dense, with the name of the baseline if the table has several."""
        text = show_difference(judged, row)
        return f"{text} vs {row['baseline']}" if row["several_baselines"] and text != NONE else text

    gap_in_text = ", ".join(filter(None, ["minus dense", judged.points]))
    return [
        Column(
            name,
            lambda arm, _: arm.mean("metric"),
            f"{judged.words}, final",
            judged.unit,
            show,
            note=lambda row: _plus_minus(row[f"{name}_ci95"], functools.partial(size, judged)),
            cell=with_half,
            brief=with_half,
            headings={"terminal": judged.words},
        ),
        Column(f"{name}_ci95", lambda arm, _: half_width(arm.values("metric"))),
        Column(f"{name}_std", lambda arm, _: _deviation(arm)),
        best(f"best_{name}", "best_metric"),
        Column("selected_by", lambda arm, _: arm.selected_by),
        best(f"test_{name}_at_best", "test_at_best"),
        Column(
            f"{name}_minus_dense",
            lambda arm, dense: against(arm, dense).gap,
            "minus dense",
            points,
            show=functools.partial(signed, judged),
            note=functools.partial(_gap_note, judged),
            cell=gap,
            brief=functools.partial(show_difference, judged, brief=True),
            headings=dict.fromkeys(("table", "paper"), gap_in_text),
        ),
        Column(f"{name}_minus_dense_ci95", lambda arm, dense: against(arm, dense).half),
        Column("interval", lambda arm, dense: against(arm, dense).how),
        Column("difference_shown", lambda arm, dense: _yes_or_no(against(arm, dense).shown)),
    ]


def best_column(table: pd.DataFrame) -> tuple[str, str]:
    """Return (name, heading) of the best value: on the test split if it is known, else `best, validation`."""
    name = table["metric"].iloc[0]
    if table[f"test_{name}_at_best"].notna().all():
        return f"test_{name}_at_best", "best"
    splits = {split_of(column) for column in table["selected_by"]}
    return f"best_{name}", "best, validation" if "validation" in splits else "best"


def _deviation(arm: Arm) -> float:
    return standard_error(arm.values("metric")) * math.sqrt(arm.n) if arm.n > 1 else math.nan


def _gap_note(judged: Metric, row: Row) -> str:
    half = row[f"{judged.name}_minus_dense_ci95"]
    if math.isnan(half):
        return "one seed" if row["n"] == 1 and row["arm"] != row["baseline"] else ""
    within = f"; {NOT_SHOWN}" if row["difference_shown"] == "no" else ""
    return f"± {size(judged, half)}{within}"


def _yes_or_no(shown: bool | None) -> str:
    """Return whether a difference was shown, as in table.csv; "" without a statement."""
    if shown is None:
        return ""
    return "yes" if shown else "no"


# ---- bytes and counts


def _volume(name: str, heading: str) -> Column:
    key, ratio = f"{name}_bytes", f"{name}_times_less"
    return Column(
        key,
        heading=heading,
        show=three_digits,
        note=lambda row: _against_dense(row, show_times(row[ratio])),
        cell=lambda row: _with(show_bytes(row[key]), show_times(row[ratio])),
        brief=lambda row: show_bytes(row[key]),
        scales=BYTES,
        unknown=NOT_COUNTED,
    )


def _times_less(column: str) -> Callable[[Arm, Arm | None], float]:
    def value(arm: Arm, dense: Arm | None) -> float:
        sent = arm.mean(column)
        if sent == 0:
            return math.inf
        theirs = dense.mean(column) if dense else 0.0
        return theirs / sent if theirs else math.nan  # the ratio of 0 and 0 is undefined

    return value


def _paper_count(row: Row) -> str:
    """Return the floats that the paper would count, and the ratio to the reference of the paper's tables."""
    named, most, own = row["paper_reference"], row["reference_floats"], row["paper_floats"]
    if named is None or row["arm"] in (named, row["baseline"]):
        return show_floats(own)
    return _with(show_floats(own), show_times(most / own if own else math.inf))


def paper_reference(table: pd.DataFrame) -> str | None:
    """Return the reference of the papers' ratios: the compressed arm that sends most; between batch sizes, dense.

    None if there is no such arm, or no dense run: that ratio is shown only in addition to the one to dense. One-worker
    controls are excluded.
    """
    table = table[table["workers"] == table["workers"].max()]
    others = table[table["arm"] != table["baseline"]]
    if not (table["baseline"] != "").all() or not len(others):
        return None
    if table["batch_size"].nunique() > 1:
        return str(table["baseline"].iloc[0])
    dense = set(table.loc[table["arm"] == table["baseline"], "paper_floats"])
    others = others[~others["paper_floats"].isin(dense)]  # fp16: as many floats as fp32
    return str(others["arm"].iloc[int(others["paper_floats"].argmax())]) if len(others) > 1 else None


# ---- times


def _timed(key: str, heading: str) -> list[Column]:
    """Return the columns of a training time and of its interval."""

    def note(row: Row) -> str:
        interval = _plus_minus(row[f"{key}_ci95"], three_digits)
        return "; ".join(filter(None, [interval, _against_dense(row, show_ratio(row, key))]))

    def cell(row: Row) -> str:
        return _with(show_seconds(row[key], row[f"{key}_ci95"]), show_ratio(row, key))

    timed = replace(_seconds(key, heading), note=note, cell=cell, brief=lambda row: show_seconds(row[key]))
    return [timed, Column(f"{key}_ci95", lambda arm, _: half_width(arm.values(key)))]


def _seconds(key: str, heading: str, in_text: str = "") -> Column:
    def cell(row: Row) -> str:
        return show_seconds(row[key])

    return Column(key, None, heading, "s", three_digits, cell=cell, headings={"table": in_text} if in_text else {})


def _against_time(key: str) -> list[Column]:
    """Return the columns of a time relative to dense, and of whether the seeds separate the two."""
    return [
        Column(f"{key}_over_dense", lambda arm, dense: over(arm, dense, key)),
        Column(f"{key}_within_noise", lambda arm, dense: within_noise(arm, dense, key)),
    ]


def over(arm: Arm, dense: Arm | None, column: str) -> float:
    """Return the ratio to dense of `seconds` or `modelled_seconds`; NaN if one is missing or they do not compare."""
    if dense is None or not comparable(arm, dense, column):
        return math.nan
    return arm.mean(column) / dense.mean(column) if dense.mean(column) else math.nan


def within_noise(arm: Arm, dense: Arm | None, column: str) -> bool:
    """Whether comparable times cannot be separated, by Welch's interval: equal seeds do not pair times."""
    if dense is None or arm is dense or math.isnan(over(arm, dense, column)):
        return False
    return difference(arm.values(column), dense.values(column)).shown is False


# ---- notes next to a number


def _plus_minus(half: float, show: Callable[[float], str]) -> str:
    return "" if math.isnan(half) else f"± {show(half)}"


def _against_dense(row: Row, text: str) -> str:
    return "" if row["arm"] == row["baseline"] or text == NONE else text


def _with(value: str, told: str) -> str:
    return f"{value} ({told})" if told not in ("", NONE) else value
