"""Write docs/matrix.md: which policies, compressors and synchronisation schemes can be combined.

    python -m scripts.matrix            # print it
    python -m scripts.matrix docs/matrix.md

The validity of three choices is decided pair by pair, so three tables are complete; tests/cli/test_pairwise.py checks
that no triple contradicts them.
"""

import argparse
import functools
from collections.abc import Iterable
from pathlib import Path

from accordion_bench.cli import smoke
from accordion_bench.cli.smoke import names
from accordion_bench.config.compose import compose
from accordion_bench.options.instantiate import Config
from accordion_bench.report.render.tables import folded

WORKERS = 4
PLAIN = {"compressor": "none", "sync": "every_step", "adaptive": "none"}
GROUPS = tuple(PLAIN)


@functools.cache
def _base(overrides: tuple[str, ...]) -> Config:
    return compose(overrides)


def cell(compressor: str, sync: str, adaptive: Iterable[str], overrides: tuple[str, ...] = ()) -> Config:
    """Return the configuration of one cell.

    Args:
        compressor, sync: names of the choices.
        adaptive: names of policies, in order.
        overrides: further overrides of the run.
    """
    return smoke.composed_cell(_base(overrides), compressor, sync, adaptive)


@functools.cache
def refusal(compressor: str, sync: str, adaptive: tuple[str, ...]) -> str | None:
    """Return the reason for which a cell is refused, or None if it runs."""
    return smoke.refusal(cell(compressor, sync, adaptive), WORKERS)


@functools.cache
def of_pair(first: str, a: str, second: str, b: str) -> str | None:
    """Return the reason for which two choices are refused together, and the simplest third one with which they run."""
    (third,) = set(GROUPS) - {first, second}

    def said(**chosen: str) -> str | None:
        return refusal(chosen["compressor"], chosen["sync"], (chosen["adaptive"],))

    thirds = [PLAIN[third], *names(third)]
    if any(said(**{first: a, second: b, third: other}) is None for other in thirds):
        return None
    # the third choice at which neither is at fault alone, so that the sentence speaks of the pair
    fair = [c for c in thirds if said(**{first: PLAIN[first], second: b, third: c}) is None]
    fair = [c for c in fair if said(**{first: a, second: PLAIN[second], third: c}) is None] or fair or thirds
    return said(**{first: a, second: b, third: fair[0]})


def table(rows: str, columns: str) -> list[str]:
    """Return one table in Markdown: a dot if the pair runs, else the number of the sentence that refuses it."""
    reasons: dict[str, int] = {}
    lines = [f"| {rows} \\ {columns} | " + " | ".join(names(columns)) + " |", "|---" * (len(names(columns)) + 1) + "|"]
    for row in names(rows):
        marks = []
        for column in names(columns):
            said = of_pair(rows, row, columns, column)
            if said is not None:
                said = general(said, row, column)
                reasons.setdefault(said, len(reasons) + 1)
            marks.append("·" if said is None else str(reasons[said]))
        lines.append(f"| {row} | " + " | ".join(marks) + " |")
    return [*lines, "", *(f"{number}. {reason}" for reason, number in reasons.items())]


def general(said: str, *choices: str) -> str:
    """Return the sentence with the choices of this cell replaced by dots, so that equal reasons appear once."""
    for choice in sorted(choices, key=len, reverse=True):
        for before in ("got ", "compressor=", "adaptive=", "sync="):
            said = said.replace(f"{before}{choice}", f"{before}…")
    return said


def document() -> str:
    """Return the text of docs/matrix.md."""
    head = """# What runs together

Written by `python -m scripts.matrix docs/matrix.md`; `tests/cli/test_pairwise.py` checks every cell by validating it,
and trains a set of runs in which every pair that runs occurs. Three choices run together where each pair of them does:
`·`. Elsewhere the cell holds the number of the sentence with which the run is refused before it starts ("…" stands for
the cell's own names). Several policies run together if no two of them drive the same quantity
(`adaptive=[accordion,alq]`): see the column *drives* of [algorithms.md](algorithms.md). Other options than the defaults
can be refused by further rules.
"""
    pairs = [("compressor", "adaptive"), ("adaptive", "sync"), ("compressor", "sync")]
    parts = [[f"## {rows} × {columns}", "", *table(rows, columns)] for rows, columns in pairs]
    return folded(head + "".join("\n" + "\n".join(part) + "\n" for part in parts))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser("scripts.matrix", description="What runs together, as a page.")
    parser.add_argument("page", nargs="?", type=Path, help="a file to write, such as docs/matrix.md; default: stdout")
    page = parser.parse_args().page
    if page:
        page.write_text(document(), encoding="utf-8")
    else:
        print(document(), end="")


if __name__ == "__main__":
    main()
