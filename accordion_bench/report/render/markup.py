"""Text from anywhere as Markdown and as LaTeX that show it, and make no link, image, HTML or code of it."""

import re
import textwrap
from collections.abc import Sequence

ESCAPED = re.compile(
    r"""[\\`$]                  # code, formulas, and what would take away an escape of ours
      | <(?=[a-zA-Z/!?])        # HTML, or a link in angle brackets
      | (?<=\])[(\[:]           # what stands behind [text]: a link, an image, where a name leads to
      | (?<=:)//                # an address, which some readers make a link of, as of the next one
      | (?<=www)\.""",
    re.VERBOSE | re.IGNORECASE,
)
FIRST = "#>~*+-[="  # with which something else begins than a line of text
WIDTH = 120
KEPT = ("|", "#", "![", "    ", "```", "<")  # tables, headings, pictures, code, comments
MARKER = re.compile(r"(?:[-*] |\d+\. )?")
BEGINS = re.compile(r" (?=[#>~*+=|-]|\d+[.)](?: |$))")  # a space behind which a list, a quote or a heading would begin


def inline(text: str) -> str:
    """One line of text inside a line of Markdown."""
    return ESCAPED.sub(r"\\\g<0>", text)


def line(text: str) -> str:
    """The same where a line or an entry of a list begins with it."""
    return f"\\{inline(text)}" if text.startswith(tuple(FIRST)) else inline(text)


def folded(text: str) -> str:
    """A page of Markdown whose paragraphs and list entries have lines of at most `WIDTH` characters.

    Args:
        text: the page, a paragraph or an entry on each line. Tables, headings, pictures and code stay as they are.

    Returns:
        The page; it is shown as before.
    """
    lines, code = [], False
    for row in text.split("\n"):
        code ^= row.startswith("```")
        kept = code or len(row) <= WIDTH or row.startswith(KEPT)
        lines += [row] if kept else _filled(row)
    return "\n".join(lines)


def _filled(row: str) -> list[str]:
    """One line as several, of which none but the first begins with what would be a list, a quote or a heading."""
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
    "[": "{[}",  # after \\ it would be a distance
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
    """Text as LaTeX shows it; a character outside ASCII that is not in the list becomes a question mark."""
    text = MINUS.sub("−", TIMES.sub("×", text))
    return "".join(SPECIAL.get(c, c if c.isascii() and c.isprintable() else "?") for c in text)


def table(cells: Sequence[Sequence[str]], caption: str, name: str) -> str:
    """A floating table.

    Args:
        cells: the headings, then one row per arm.
        caption: plain text.
        name: of its label, `tab:NAME`; letters, digits and hyphens.
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
    """A row, and below it what stands in parentheses: side by side, tables would be wider than a page."""
    first, *rest = row
    numbers, beside = zip(*(cell.partition(" (")[::2] for cell in rest), strict=True)
    below = [f"({escaped(text)}" if text else "" for text in beside]
    lines = [[escaped(first), *map(escaped, numbers)], *([["", *below]] if any(below) else [])]
    return [" & ".join(line) + r" \\" for line in lines]


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
