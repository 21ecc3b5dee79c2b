"""The comparison table for people: cells of text, and aligned Markdown."""

import functools
import math
from collections.abc import Callable, Sequence

import pandas as pd

from accordion_bench.report.compare.show import (
    NONE,
    Row,
    if_known,
    show_bytes,
    show_difference,
    show_floats,
    show_ratio,
    show_times,
    show_value,
)
from accordion_bench.report.compare.tidy import best_column
from accordion_bench.report.render.markup import inline
from accordion_bench.runs.metrics import Metric, metric

Column = tuple[str, Callable[[Row], str]]


def markdown(table: pd.DataFrame) -> str:
    """The table of one setting, for people."""
    return aligned(cells(table))


def cells(table: pd.DataFrame, paper: bool = False) -> list[list[str]]:
    """Text of the table of one setting: the headings, then a row per arm.

    Args:
        table: of `tidy`.
        paper: only what papers show: what was evaluated, data sent and time, with their ratios.
    """
    columns = [*_judged(table, paper), *_sent(table, paper), *_time(table, paper), *_paper_count(table)]
    return [[heading for heading, _ in columns]] + [
        [show(row) for _, show in columns] for row in table.to_dict("records")
    ]


def _judged(table: pd.DataFrame, paper: bool) -> list[Column]:
    judged = metric(table["metric"].iloc[0])
    name = judged.name
    columns: list[Column] = [
        ("arm", lambda row: row["arm"]),
        ("n", lambda row: str(row["n"])),
        (f"{judged.words}, final", lambda row: show_value(judged, row[name], row[f"{name}_ci95"])),
    ]
    if not paper:
        best, heading = best_column(table)
        columns.append((heading, lambda row: show_value(judged, row[best])))
    if (table["baseline"] != "").any():
        several = table["baseline"].nunique() > 1
        columns.append(
            (", ".join(filter(None, ["minus dense", judged.points])), functools.partial(_gap, judged, several))
        )
    return columns


def _gap(judged: Metric, several: bool, row: Row) -> str:
    """The difference to dense, with the name of that dense arm where a table has several."""
    text = show_difference(judged, row)
    return f"{text} vs {row['baseline']}" if several and text != NONE else text


def _sent(table: pd.DataFrame, paper: bool) -> list[Column]:
    def volume(name: str) -> Callable[[Row], str]:
        return lambda row: _with(show_bytes(row[f"{name}_bytes"]), show_times(row[f"{name}_times_less"]))

    sent = {"payload": "payload"} if paper else {"payload": "payload", "wire": "sent per worker"}
    return [(heading, volume(name)) for name, heading in sent.items()]


def _time(table: pd.DataFrame, paper: bool) -> list[Column]:
    def seconds(column: str) -> Callable[[Row], str]:
        return lambda row: _with(show_seconds(row[column], row[f"{column}_ci95"]), show_ratio(row, column))

    columns: list[Column] = [("time", seconds("seconds"))]
    if not paper:
        columns.append(("exchange", lambda row: show_seconds(row["exposed_seconds"])))
        if table["comm_seconds"].notna().any():
            columns.append(("communication", lambda row: show_seconds(row["comm_seconds"])))
    if table["modelled_seconds"].notna().any():
        columns.append(("modelled time", seconds("modelled_seconds")))
        if not paper:
            columns.append(("modelled comm.", lambda row: show_seconds(row["modelled_comm_seconds"])))
            columns.append(("rounds", lambda row: if_known(row["rounds"], "{:,.0f}")))
    return columns


def _paper_count(table: pd.DataFrame) -> list[Column]:
    """The floats that the paper would count, and times less than the reference of the paper's tables."""
    if not table["paper_floats"].notna().all():
        return []
    named = paper_reference(table)
    if named is None:
        return [("paper's count", lambda row: show_floats(row["paper_floats"]))]
    most = float(table.loc[table["arm"] == named, "paper_floats"].iloc[0])

    def count(row: Row) -> str:
        told = "" if row["arm"] in (named, row["baseline"]) else show_times(_quotient(most, row["paper_floats"]))
        return _with(show_floats(row["paper_floats"]), told)

    return [(f"paper's count (vs {named})", count)]


def paper_reference(table: pd.DataFrame) -> str | None:
    """The arm that the papers' ratios are against: the compressed one that sends most; between batch sizes, dense.

    None where there is no such arm, and without a dense run: that ratio may stand beside the one to dense, never alone.
    Controls of one worker are no such arm.
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


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the heading first, as Markdown that also reads well in a terminal."""
    cells = [[inline(cell).replace("|", "\\|") for cell in row] for row in cells]
    widths = [max(2, *map(len, column)) for column in zip(*cells, strict=True)]
    rows = [
        [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        for row in cells
    ]
    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


def _with(value: str, told: str) -> str:
    return f"{value} ({told})" if told not in ("", NONE) else value


def _quotient(a: float, b: float) -> float:
    return a / b if b else math.inf


def show_seconds(value: float, half: float = math.nan) -> str:
    """`12.3 ± 0.4 s`; NaN as a dash."""
    if math.isnan(value):
        return NONE
    places = 1 if value >= 1 else 2
    return f"{value:.{places}f} s" if math.isnan(half) else f"{value:.{places}f} ± {half:.{places}f} s"
