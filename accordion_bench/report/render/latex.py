"""The comparison table as LaTeX, with booktabs; compiles by itself in a document that loads that package."""

import re
from collections.abc import Sequence

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
