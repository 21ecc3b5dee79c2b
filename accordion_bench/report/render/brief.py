"""What a terminal shows of a report: the answer, and a table of few columns that fits its width."""

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pandas as pd

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.show import NONE, Row, show_bytes, show_gap_of, show_value
from accordion_bench.report.compare.tidy import tidy
from accordion_bench.report.compare.verdicts import answers
from accordion_bench.report.render import captions
from accordion_bench.report.render.table import show_seconds
from accordion_bench.report.render.write import first
from accordion_bench.runs.metrics import metric

FEWEST = 2  # columns of a narrow terminal
LONGEST, SHORTEST = 34, 14  # letters of a line of an arm's name
BETWEEN = "  "


class Column(NamedTuple):
    """One column: its heading, and the cell of a row of `tidy`."""

    name: str
    cell: Callable[[Row], str]


def brief(parts: Sequence[Sequence[Arm]], absent: dict[str, Sequence[str]], width: int) -> str:
    """Everything that a terminal is told, without markup.

    Args:
        parts: the arms of each setting.
        absent: heading -> lines, for what is in no mean.
        width: letters of a line of the terminal.
    """
    told = [_setting(arms, width) for arms in parts]
    for heading, lines in absent.items():
        told.append("\n".join([f"{heading}:", *(_wrapped(f"- {said}", width) for said in first(lines))]))
    return "\n\n".join(told) + "\n"


def _setting(arms: Sequence[Arm], width: int) -> str:
    rows = tidy(arms)
    lines = [_wrapped(captions.heading(arms[0]), width), "", _wrapped(" ".join(answers(arms)), width), ""]
    lines.append(table := fitting(rows, width))
    if "minus dense" in table and (rows["difference_shown"] == "no").any():
        lines += ["", _wrapped("(in brackets: no difference shown)", width)]
    return "\n".join(lines)


def columns_of(table: pd.DataFrame) -> list[Column]:
    """Six at most; what a narrow terminal can do without comes last."""
    judged = metric(table["metric"].iloc[0])
    found = [Column(judged.words, lambda row: show_value(judged, row[judged.name], row[f"{judged.name}_ci95"]))]
    if (table["baseline"] != "").any():
        found.append(Column("minus dense", lambda row: show_gap_of(judged, row)))
    found.append(Column("sent per worker", lambda row: show_bytes(row["wire_bytes"])))
    modelled = table["comm_seconds"].isna().all() and table["modelled_seconds"].notna().any()
    column, name = ("modelled_seconds", "modelled time") if modelled else ("seconds", "time")
    found.append(Column(name, lambda row: NONE if math.isnan(row[column]) else show_seconds(row[column])))
    return [*found, Column("n", lambda row: str(row["n"]))]


def fitting(table: pd.DataFrame, width: int) -> str:
    """The table of one setting, with as many of its columns as fit; long names of arms go on in the next line.

    Args:
        table: of `tidy`.
        width: letters of a line.
    """
    rows, columns = table.to_dict("records"), columns_of(table)
    names = [textwrap.wrap(row["arm"], min(LONGEST, max(SHORTEST, width // 3))) for row in rows]
    widths = [max(len("arm"), *(len(line) for name in names for line in name))]
    cells = [[column.name, *(column.cell(row) for row in rows)] for column in columns]
    widths += [max(map(len, column)) for column in cells]
    while len(widths) > FEWEST and sum(widths) + len(BETWEEN) * (len(widths) - 1) > width:
        widths.pop()
    lines = []
    for i, name in enumerate([["arm"], *names]):
        values = [column[i].rjust(wide) for column, wide in zip(cells, widths[1:], strict=False)]
        lines.append(BETWEEN.join([name[0].ljust(widths[0]), *values]))
        lines += name[1:]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent="  " if text.startswith("- ") else "")
