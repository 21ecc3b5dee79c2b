"""The table of the page: units in the head, and with every cell the number that table.csv has."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from accordion_bench.report.compare.show import NO_DIFFERENCE, NONE, NOT_COUNTED, show_ratio, show_times, signed, size
from accordion_bench.report.compare.tidy import best_column
from accordion_bench.runs.metrics import Metric, metric

Row = dict[Any, Any]
BYTES = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}
COUNTS = {"billions": 1e9, "millions": 1e6, "thousands": 1e3, "": 1.0}


@dataclass(frozen=True)
class Cell:
    """One number.

    Args:
        value: as table.csv has it, by which rows are sorted; "" where there is none.
        text: as it is read.
        beside: what is said of it: its interval, its ratio to dense.
    """

    value: str
    text: str
    beside: str = ""


@dataclass(frozen=True)
class Column:
    """One column.

    Args:
        key: its name in table.csv.
        name: in words.
        unit: of its numbers; "" for none.
        cells: one per arm.
        more: rarely needed.
    """

    key: str
    name: str
    unit: str
    cells: Sequence[Cell]
    more: bool

    @property
    def says_something(self) -> bool:
        """Whether there is a number in it."""
        return any(cell.value for cell in self.cells)


def columns(table: pd.DataFrame) -> list[Column]:
    """The columns after the arm's name that hold anything.

    Args:
        table: of `tidy`.
    """
    rows: list[Row] = table.to_dict("records")
    judged = metric(rows[0]["metric"])
    counts = Column("n", "n", "seeds", [Cell(str(row["n"]), str(row["n"])) for row in rows], more=False)
    found = [counts, *_judged(rows, judged, *best_column(table)), *_sent(rows), *_times(rows), *_texts(rows)]
    return [column for column in found if column.says_something]


def _judged(rows: Sequence[Row], judged: Metric, best: str, heading: str) -> list[Column]:
    name, points = judged.name, judged.points if judged.percent else ""

    def shown(value: float) -> str:
        return f"{judged.scaled(value):.2f}" if judged.percent else judged.show(value)

    def gap(row: Row) -> str:
        half = row[f"{name}_minus_dense_ci95"]
        if math.isnan(half):
            return "one seed" if row["n"] == 1 and row["arm"] != row["baseline"] else ""
        within = f"; {NO_DIFFERENCE}" if row["difference_shown"] == "no" else ""
        return f"± {size(judged, half)}{within}"

    def half(row: Row) -> str:
        value = row[f"{name}_ci95"]
        return "" if math.isnan(value) else f"± {size(judged, value)}"

    return [
        _column(rows, name, f"{judged.words}, final", judged.unit, shown, half),
        _column(rows, f"{name}_minus_dense", "minus dense", points, lambda value: signed(judged, value), gap),
        _column(rows, best, f"{judged.words}, {heading}", judged.unit, shown, more=True),
    ]


def _sent(rows: Sequence[Row]) -> list[Column]:
    def less(key: str) -> Callable[[Row], str]:
        return lambda row: "" if row["arm"] == row["baseline"] else _known(show_times(row[key]))

    def volume(key: str, name: str, beside: Callable[[Row], str], more: bool) -> Column:
        return _scaled(rows, f"{key}_bytes", name, BYTES, beside, more, none=NOT_COUNTED)

    return [
        volume("wire", "sent per worker", less("wire_times_less"), False),
        volume("payload", "payload", less("payload_times_less"), True),
        volume("link_sent", "sent by the interface", _nothing, True),
        _scaled(rows, "rounds", "rounds", COUNTS, less("rounds_times_less"), True),
        _scaled(rows, "paper_floats", "paper's count of floats", COUNTS, _nothing, True),
    ]


def _times(rows: Sequence[Row]) -> list[Column]:
    def ratio(key: str) -> Callable[[Row], str]:
        def said(row: Row) -> str:
            half = row[f"{key}_ci95"]
            parts = [] if math.isnan(half) else [f"± {_digits(half)}"]
            parts += [] if row["arm"] == row["baseline"] else [_known(show_ratio(row, key))]
            return "; ".join(filter(None, parts))

        return said

    return [
        _column(rows, "seconds", "time", "s", _digits, ratio("seconds")),
        _column(rows, "modelled_seconds", "modelled time", "s", _digits, ratio("modelled_seconds")),
        _column(rows, "exposed_seconds", "exchange", "s", _digits, more=True),
        _column(rows, "comm_seconds", "communication", "s", _digits, more=True),
        _column(rows, "modelled_comm_seconds", "modelled communication", "s", _digits, more=True),
    ]


def _texts(rows: Sequence[Row]) -> list[Column]:
    """Words, which are sorted as words."""
    names = {"seeds": "seeds", "batch_size": "batch size", "network": "modelled network", "baseline": "against"}
    found = []
    for key, name in names.items():
        texts: list[str] = ["" if pd.isna(row[key]) else str(row[key]) for row in rows]
        found.append(Column(key, name, "", [Cell(each, each or NONE) for each in texts], more=True))
    return found


def _nothing(row: Row) -> str:
    return ""


def _known(text: str) -> str:
    return "" if text == NONE else text


def _column(
    rows: Sequence[Row],
    key: str,
    name: str,
    unit: str,
    show: Callable[[float], str],
    beside: Callable[[Row], str] = _nothing,
    more: bool = False,
    none: str = NONE,
) -> Column:
    cells = []
    for row in rows:
        value = row[key]
        known = value is not None and not math.isnan(value)
        cells.append(Cell(repr(value), show(value), beside(row)) if known else Cell("", none))
    return Column(key, name, unit, cells, more)


def _scaled(
    rows: Sequence[Row],
    key: str,
    name: str,
    units: dict[str, float],
    beside: Callable[[Row], str],
    more: bool,
    none: str = NONE,
) -> Column:
    """In the unit in which the middle one of the numbers is at least 1."""
    values = sorted(row[key] for row in rows if not math.isnan(row[key]))
    middle = values[len(values) // 2] if values else 0
    unit, factor = next(((unit, factor) for unit, factor in units.items() if middle >= factor), ("", 1.0))
    return _column(rows, key, name, unit, lambda value: _digits(value / factor), beside, more, none)


def _digits(value: float) -> str:
    """Three digits, more where they stand before the point."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")
