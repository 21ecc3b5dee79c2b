"""How an arm is drawn: a colour, a marker and a dash of its own, the same in every figure of every report."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accordion_bench.report.compare.arms import Arm

BLACK = "#000000"  # of dense
GREY = "#555555"  # of small print
# of published palettes (Tol, Petroff, Okabe and Ito) the ten that stay furthest apart under every colour blindness
COLOURS = ("#1845FB", "#E69F00", "#BD1F01", "#228833", "#AA4499", "#56B4E9", "#332288", "#661100", "#B9AC70", "#656364")
# as matplotlib and plotly call them
SYMBOLS = {"o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down", "P": "cross"}
SYMBOLS |= {"X": "x", "p": "pentagon", "d": "diamond-tall", ">": "triangle-right"}
MARKERS = tuple(SYMBOLS)
# lengths of dashes and gaps, in widths of the line; where one lies on another, a tenth of that is seen through the gaps
DASHES: tuple[tuple[float, ...], ...] = (
    (9, 2),
    (5, 2),
    (8, 2, 2, 2, 2, 2),
    (2, 2),
    (9, 2, 2, 2),
    (4, 2),
    (8, 2, 4, 2),
    (9, 2, 3, 2, 3, 2),
    (5, 2, 4, 2),
    (8, 2),
)


@dataclass(frozen=True)
class Look:
    """How one arm is drawn.

    Args:
        colour: as #RRGGBB.
        marker: matplotlib's letter.
        line: the dash as matplotlib has it; solid for dense alone, which is drawn below all others.
        fill: `full` or `none`: which part of the marker is filled.
    """

    colour: str
    marker: str
    line: Any = "-"
    fill: str = "full"

    @property
    def point(self) -> dict[str, Any]:
        """Options of a marker without a line, for matplotlib."""
        full = self.fill == "full"
        edge = {"markeredgecolor": "white" if full else self.colour, "markeredgewidth": 0.4 if full else 0.9}
        face = {"markerfacecolor": self.colour if full else "white"}
        return {"color": self.colour, "marker": self.marker, "linestyle": "", **edge, **face}

    @property
    def symbol(self) -> str:
        """The marker as plotly calls it."""
        return SYMBOLS[self.marker] + ("" if self.fill == "full" else "-open")

    @property
    def dash(self) -> str:
        """The dash as plotly writes it."""
        return "solid" if self.line == "-" else ",".join(f"{length:g}px" for length in self.line[1])


def looks(arms: Sequence[Arm]) -> list[Look]:
    """The look of each arm of one setting."""
    return looks_of([(arm.label, arm.runs[0].label, arm.dense) for arm in arms])


def looks_of(named: Sequence[tuple[str, str, bool]]) -> list[Look]:
    """The look of each (label, method, whether it is dense), whatever order they are given in.

    A method has the colour that it wishes for most, unless one with the same wish comes before it by label.
    No two looks are the same.
    """
    order = sorted(range(len(named)), key=lambda i: named[i])
    dense = [i for i in order if named[i][2]]
    found = {i: Look(BLACK, MARKERS[turn % len(MARKERS)], _line(turn)) for turn, i in enumerate(dense)}
    left, turn = [i for i in order if not named[i][2]], 0
    while left:  # each turn gives every colour once
        given = _given([wishes(named[i][1]) for i in left])
        found |= {left[k]: _look(colour, turn) for k, colour in given.items()}
        left, turn = [i for k, i in enumerate(left) if k not in given], turn + 1
    return [found[i] for i in range(len(named))]


def wishes(method: str) -> list[int]:
    """The numbers of the colours, the dearest first: of each method its own order, by rendezvous hashing."""
    return sorted(range(len(COLOURS)), key=lambda i: hashlib.sha256(f"{i} {method}".encode()).digest())


def _given(wished: Sequence[list[int]]) -> dict[int, int]:
    """Who gets which colour: first all first wishes, then what is left of the second ones, and so on."""
    given: dict[int, int] = {}
    for rank in range(len(COLOURS)):
        for k, own in enumerate(wished):
            if k not in given and own[rank] not in given.values():
                given[k] = own[rank]
    return given


def _look(colour: int, turn: int) -> Look:
    """The look of a colour's first, second, ... arm: each with another marker and dash."""
    marker, dash = (colour + turn) % len(MARKERS), (colour + turn + turn // len(MARKERS)) % len(DASHES)
    return Look(COLOURS[colour], MARKERS[marker], (0, DASHES[dash]), "none" if turn % 2 else "full")


def _line(turn: int) -> Any:
    """Of the first dense arm solid."""
    return "-" if turn == 0 else (0, DASHES[(turn - 1) % len(DASHES)])
