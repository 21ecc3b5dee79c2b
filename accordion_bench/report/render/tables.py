"""Rendering of the comparison table: Markdown, LaTeX, CSV, HTML page and terminal.

Each format is one loop over the columns declared in `compare.columns`. Untrusted text is escaped so that Markdown and
LaTeX show it literally, without links, images, HTML or code.
"""

import re
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd

from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.compare.columns import GAP, OFTEN, Column, paper_reference, shown, tidy
from accordion_bench.report.compare.intervals import Row, first
from accordion_bench.report.compare.verdicts import answers
from accordion_bench.report.render import captions

ESCAPED = re.compile(
    r"""[\\`$]                  # code, formulas, and backslashes that would cancel our escapes
      | <(?=[a-zA-Z/!?])        # HTML, or a link in angle brackets
      | (?<=\])[(\[:]           # after [text]: a link, an image, a link definition
      | (?<=:)//                # an address, which some readers turn into a link, like the next one
      | (?<=www)\.""",
    re.VERBOSE | re.IGNORECASE,
)
FIRST = "#>~*+-[="  # first characters that Markdown does not read as plain text
WIDTH = 120
KEPT = ("|", "#", "![", "    ", "```", "<")  # tables, headings, pictures, code, comments
MARKER = re.compile(r"(?:[-*] |\d+\. )?")
BEGINS = re.compile(r" (?=[#>~*+=|-]|\d+[.)](?: |$))")  # a space before a possible list, quote or heading


def inline(text: str) -> str:
    """Escape a text inside a line of Markdown."""
    return ESCAPED.sub(r"\\\g<0>", text)


def line(text: str) -> str:
    """Escape a text at the start of a line or list entry of Markdown."""
    return f"\\{inline(text)}" if text.startswith(tuple(FIRST)) else inline(text)


def folded(text: str) -> str:
    """Wrap Markdown with one paragraph or list entry per line to `WIDTH` characters; the rendered page is the same.

    Tables, headings, pictures and code are not wrapped.
    """
    lines, code = [], False
    for row in text.split("\n"):
        code ^= row.startswith("```")
        kept = code or len(row) <= WIDTH or row.startswith(KEPT)
        lines += [row] if kept else _filled(row)
    return "\n".join(lines)


def _filled(row: str) -> list[str]:
    """Wrap one line; no continuation line starts like a list, a quote or a heading."""
    marker = "".join(MARKER.findall(row)[:1])
    bound = BEGINS.sub("\0", row.removeprefix(marker))
    lines = textwrap.TextWrapper(WIDTH, marker, " " * len(marker), break_long_words=False, break_on_hyphens=False)
    return [one.replace("\0", " ") for one in lines.wrap(bound)]


SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # after \\ it would be read as a length
    "]": "{]}",
    '"': "''",
    "±": r"$\pm$",
    "×": r"$\times$",
    "µ": r"$\mu$",
    "–": "--",
    "−": "$-$",
    "…": r"\ldots{}",
    "\n": " ",
}
TIMES = re.compile(r"(?<=\d)x(?!\w)|(?<=\s)x(?=\s\d)")  # 9.19x less, 4 workers x 32
MINUS = re.compile(r"(?<![\w)}])-(?=\d)")


def escaped(text: str) -> str:
    """Escape a text for LaTeX; an unlisted character outside ASCII becomes a question mark."""
    text = MINUS.sub("−", TIMES.sub("×", text))
    return "".join(SPECIAL.get(c, c if c.isascii() and c.isprintable() else "?") for c in text)


def latex(cells: Sequence[Sequence[str]], caption: str, name: str) -> str:
    """Return a floating LaTeX table.

    Args:
        cells: headings, then one row per arm.
        caption: plain text.
        name: name in its label, `tab:NAME`; letters, digits and hyphens.
    """
    head, *rows = ["\n".join(f"    {line}" for line in _lines(row)) for row in cells]
    body = "\n    \\addlinespace\n".join(rows)
    return "\n".join(
        [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{escaped(caption)}}}",
            rf"  \label{{tab:{name}}}",
            r"  \footnotesize",
            rf"  \begin{{tabular}}{{l{'r' * (len(cells[0]) - 1)}}}",
            *(r"    \toprule", head, r"    \midrule", body, r"    \bottomrule"),
            r"  \end{tabular}",
            r"\end{table}",
        ]
    )


def _lines(row: Sequence[str]) -> list[str]:
    """Return a row, followed by a row of the parts in parentheses, because tables would otherwise exceed the page."""
    first, *rest = row
    numbers, beside = zip(*(cell.partition(" (")[::2] for cell in rest), strict=True)
    below = [f"({escaped(text)}" if text else "" for text in beside]
    lines = [[escaped(first), *map(escaped, numbers)], *([["", *below]] if any(below) else [])]
    return [" & ".join(line) + r" \\" for line in lines]


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Return rows of cells, headings first, as a Markdown table with aligned columns."""
    cells = [[inline(cell).replace("|", "\\|") for cell in row] for row in cells]
    widths = [max(2, *map(len, column)) for column in zip(*cells, strict=True)]
    rows = [
        [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        for row in cells
    ]
    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))


# columns of a text table that are omitted if another column is empty
NEEDED = {
    **{GAP: "baseline", "comm_seconds": "comm_seconds"},
    **dict.fromkeys(("modelled_seconds", "modelled_comm_seconds", "rounds"), "modelled_seconds"),
}
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of a cell that a spreadsheet evaluates
FEWEST = 2  # columns on a narrow terminal
LONGEST, SHORTEST = 34, 14  # largest and smallest width of an arm's name, in characters
BETWEEN = "  "


# ---- tables of text


def markdown(table: pd.DataFrame) -> str:
    """Return the table of one setting as Markdown."""
    return aligned(cells(table))


def cells(table: pd.DataFrame, paper: bool = False) -> list[list[str]]:
    """Return the text table of one setting: the headings, then a row per arm.

    With `paper` it has only the columns of papers: metric, data sent and time, with their ratios.
    """
    place = "paper" if paper else "table"
    reference = paper_reference(table) if table["paper_floats"].notna().all() else None
    own = {name: column for name, column in shown(table, place).items() if _told(table, name)}
    headings = [column.headed(place) for column in own.values()]
    if reference is not None:
        headings[list(own).index("paper_floats")] += f" (vs {reference})"
    rows = _rows(table, reference)
    return [headings] + [[column.cell(row) for column in own.values()] for row in rows]


def _told(table: pd.DataFrame, name: str) -> bool:
    if name == "paper_floats":
        return bool(table[name].notna().all())
    needed = table[NEEDED.get(name, "arm")]
    return bool((needed.notna() & (needed != "")).any())


def _rows(table: pd.DataFrame, reference: str | None) -> list[Row]:
    """Return the rows, extended by values of the whole table that their cells need."""
    most = None if reference is None else float(table.loc[table["arm"] == reference, "paper_floats"].iloc[0])
    several = table["baseline"].nunique() > 1
    whole = {"several_baselines": several, "paper_reference": reference, "reference_floats": most}
    return [{**row, **whole} for row in table.to_dict("records")]


# ---- table.csv


def csv(tables: Sequence[pd.DataFrame]) -> str:
    """Concatenate tables as CSV; text that a spreadsheet could evaluate as a formula is prefixed with an apostrophe."""
    table = pd.concat(tables)
    table.columns = [_no_formula(name) for name in table.columns]
    text = [name for name in table.columns if not pd.api.types.is_numeric_dtype(table[name])]
    return str(table.assign(**{name: table[name].map(_no_formula) for name in text}).to_csv(index=False))


def _no_formula(cell: Any) -> Any:
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell


# ---- the page


class PageCell(NamedTuple):
    """One number on the page.

    value: value in table.csv, by which rows are sorted; "" if missing.
    text: displayed number.
    beside: note: its interval or ratio to dense.
    """

    value: str
    text: str
    beside: str = ""


class PageColumn(NamedTuple):
    """One column on the page.

    key: name in table.csv.
    name: heading.
    unit: unit of its numbers; "" = none.
    cells: one per arm.
    more: whether the column is shown on request only.
    """

    key: str
    name: str
    unit: str
    cells: Sequence[PageCell]
    more: bool


def page_columns(table: pd.DataFrame) -> list[PageColumn]:
    """Return the non-empty columns of a `tidy` table after the arm's name."""
    rows, found = table.to_dict("records"), []
    for name, column in shown(table, "page").items():
        scaled = column.scaled([row[column.key] for row in rows])
        own = [_page_cell(scaled, row) for row in rows]
        if any(cell.value for cell in own):
            found.append(PageColumn(column.key, column.headed("page"), scaled.unit, own, name not in OFTEN))
    return found


def _page_cell(column: Column, row: Row) -> PageCell:
    value = row[column.key]
    if pd.isna(value) or value == "":
        return PageCell("", column.unknown)
    return PageCell(str(value), column.show(value), column.note(row))


# ---- a terminal


def brief(parts: Sequence[Sequence[Arm]], absent: dict[str, Sequence[str]], width: int) -> str:
    """Return the report for a terminal, without markup: the answer, and a table of few columns that fits the width.

    Args:
        parts: arms of each setting.
        absent: heading -> lines, for runs that enter no mean.
        width: width of the terminal in characters.
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


def few_columns(table: pd.DataFrame) -> dict[str, Column]:
    """Return at most six columns, including the arm's name, the least important ones last."""
    modelled = table["comm_seconds"].isna().all() and table["modelled_seconds"].notna().any()
    without = {"seconds"} if modelled else {"modelled_seconds"}
    if (table["baseline"] == "").all():
        without.add(GAP)
    return {name: column for name, column in shown(table, "terminal").items() if name not in without}


def fitting(table: pd.DataFrame, width: int) -> str:
    """Return the `tidy` table of one setting with as many columns as fit `width` characters; long names are wrapped."""
    rows, few = table.to_dict("records"), few_columns(table).values()
    names = [textwrap.wrap(row["arm"], min(LONGEST, max(SHORTEST, width // 3))) for row in rows]
    widths = [max(len("arm"), *(len(line) for name in names for line in name))]
    texts = [[column.headed("terminal"), *(column.brief(row) for row in rows)] for column in few]
    widths += [max(map(len, column)) for column in texts]
    while len(widths) > FEWEST and sum(widths) + len(BETWEEN) * (len(widths) - 1) > width:
        widths.pop()
    lines = []
    for i, name in enumerate([["arm"], *names]):
        values = [column[i].rjust(wide) for column, wide in zip(texts, widths[1:], strict=False)]
        lines.append(BETWEEN.join([name[0].ljust(widths[0]), *values]))
        lines += name[1:]
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> str:
    return textwrap.fill(text, width, subsequent_indent="  " if text.startswith("- ") else "")
