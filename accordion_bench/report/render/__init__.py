"""Rendering of reports: tables, figures and the HTML page. This module has the appearance of arms, common to all.

A look is a shade of the method's colour, a marker and a dash pattern. Importing this package first imports matplotlib
safely: a notebook exports its own MPLBACKEND to child processes, where that backend may be missing. Reports do not draw
with it; if it can be imported, it remains the backend of the user's own figures.
"""

import contextlib
import hashlib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accordion_bench.methods.labels import hook_of, policies_of
from accordion_bench.report.compare.arms import Arm


def _load() -> None:
    named = os.environ.pop("MPLBACKEND", None)
    try:
        matplotlib = importlib.import_module("matplotlib")
    finally:
        if named is not None:
            os.environ["MPLBACKEND"] = named
    if named:
        with contextlib.suppress(ValueError):
            matplotlib.rcParams["backend"] = named


if "matplotlib" not in sys.modules:
    _load()

BLACK = "#000000"  # of dense arms
GREY = "#555555"  # of footnotes
# ten colours of published palettes (Tol, Petroff, Okabe and Ito) that are most distinct under all colour blindness
COLOURS = ("#1845FB", "#E69F00", "#BD1F01", "#228833", "#AA4499", "#56B4E9", "#332288", "#661100", "#B9AC70", "#656364")
# shades of a colour: share of black, or of white for a dark colour, to stay distinct from dense's black
SHADES, DARK, LIGHTER = (0.0, 0.4, 0.6, 0.2, 0.5, 0.3), 105, 0.75
# names in matplotlib and in plotly
SYMBOLS = {"o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down", "P": "cross"}
SYMBOLS |= {"X": "x", "p": "pentagon", "d": "diamond-tall", ">": "triangle-right"}
MARKERS = tuple(SYMBOLS)
# lengths of dashes and gaps, in line widths; the gaps let at least a tenth of a covered line show
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
class ArmLook:
    """Appearance of one arm.

    Args:
        colour: as #RRGGBB.
        marker: matplotlib's letter.
        line: matplotlib's dash pattern; only dense, which is drawn below all others, is solid.
        fill: `full` or `none`: filled part of the marker.
    """

    colour: str
    marker: str
    line: Any = "-"
    fill: str = "full"

    @property
    def point(self) -> dict[str, Any]:
        """matplotlib options of a marker without a line."""
        full = self.fill == "full"
        edge = {"markeredgecolor": "white" if full else self.colour, "markeredgewidth": 0.4 if full else 0.9}
        face = {"markerfacecolor": self.colour if full else "white"}
        return {"color": self.colour, "marker": self.marker, "linestyle": "", **edge, **face}

    @property
    def symbol(self) -> str:
        """plotly's name of the marker."""
        return SYMBOLS[self.marker] + ("" if self.fill == "full" else "-open")

    @property
    def dash(self) -> str:
        """plotly's notation of the dash pattern."""
        return "solid" if self.line == "-" else ",".join(f"{length:g}px" for length in self.line[1])


Drawn = tuple[Arm, ArmLook]


def looks(arms: Sequence[Arm]) -> list[ArmLook]:
    """Return the look of each arm of one setting."""
    return looks_of([(arm.label, family(arm), arm.dense) for arm in arms])


def with_looks(arms: Sequence[Arm]) -> list[Drawn]:
    """Pair each arm of one setting with its look."""
    return list(zip(arms, looks(arms), strict=True))


def family(arm: Arm) -> str:
    """Return the name shared by arms that differ only in a level or another option: policies, scheme, compressor."""
    choices = arm.config.get("choices") or {}
    words = [*policies_of(arm.config), choices.get("sync"), choices.get("compressor"), hook_of(arm.config)]
    return " ".join(str(word) for word in words if word) if not arm.attached else arm.method


def looks_of(named: Sequence[tuple[str, str, bool]]) -> list[ArmLook]:
    """Return the look of each (label, family, whether it is dense), independently of their order.

    A family has its preferred colour, unless another family with the same preference precedes it by name; its arms have
    shades of it. No two looks are equal, and among ten arms no two markers or dash patterns.
    """
    order = sorted(range(len(named)), key=lambda i: named[i])
    dense = [i for i in order if named[i][2]]
    found = {i: ArmLook(BLACK, MARKERS[turn % len(MARKERS)], _line(turn)) for turn, i in enumerate(dense)}
    families: dict[str, list[int]] = {}
    for i in order:
        if not named[i][2]:
            families.setdefault(named[i][1], []).append(i)
    colours = _colours(sorted(families))
    turns = [0] * len(COLOURS)
    markers = {look.marker for look in found.values()}
    taken: tuple[set[str], set[Any]] = (markers, {look.line[1] for look in found.values() if look.line != "-"})
    for place in range(max(map(len, families.values()), default=0)):  # the first of each family, then the second ones
        for name in sorted(families):
            if place < len(families[name]):
                colour = colours[name]
                look = _look(colour, turns[colour], taken)
                while look in found.values():
                    turns[colour] += 1
                    look = _look(colour, turns[colour], taken)
                found[families[name][place]] = look
                turns[colour] += 1
    return [found[i] for i in range(len(named))]


def _colours(families: Sequence[str]) -> dict[str, int]:
    """Return the colour of each family; with more families than colours, several share one."""
    found: dict[str, int] = {}
    left = list(families)
    while left:  # each turn assigns every colour once
        given = _assigned([preferences(name) for name in left])
        found |= {left[k]: colour for k, colour in given.items()}
        left = [name for k, name in enumerate(left) if k not in given]
    return found


def preferences(method: str) -> list[int]:
    """Return the indices of the colours by preference, in an order specific to the method (rendezvous hashing)."""
    return sorted(range(len(COLOURS)), key=lambda i: hashlib.sha256(f"{i} {method}".encode()).digest())


def _assigned(preferred: Sequence[list[int]]) -> dict[int, int]:
    """Assign colours to methods: first all first preferences, then second preferences among the colours left, ..."""
    given: dict[int, int] = {}
    for rank in range(len(COLOURS)):
        for k, own in enumerate(preferred):
            if k not in given and own[rank] not in given.values():
                given[k] = own[rank]
    return given


def _look(colour: int, turn: int, taken: tuple[set[str], set[Any]]) -> ArmLook:
    """Return the look of a colour's first, second, ... arm (`turn` 0, 1, ...), by the index of the colour.

    The arm gets another shade, and a free marker and dash if there is one; these are added to `taken` in place.
    """
    marker = _free(MARKERS, colour + turn, taken[0])
    dash = _free(DASHES, colour + turn + turn // len(MARKERS), taken[1])
    return ArmLook(_shade(COLOURS[colour], turn), marker, (0, dash), "none" if turn % 2 else "full")


def _free(choices: Sequence[Any], first: int, taken: set[Any]) -> Any:
    """Return the first free choice from index `first` on, cyclically; the choice at `first` if none is free."""
    turned = [choices[(first + i) % len(choices)] for i in range(len(choices))]
    found = next((choice for choice in turned if choice not in taken), turned[0])
    taken.add(found)
    return found


def _shade(colour: str, turn: int) -> str:
    """Return the colour itself for turn 0, then shades of it."""
    share, parts = SHADES[turn % len(SHADES)], [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    dark = 0.3 * parts[0] + 0.59 * parts[1] + 0.11 * parts[2] < DARK
    share, towards = (LIGHTER * share, 255) if dark else (share, 0)
    return "#" + "".join(f"{round((1 - share) * part + share * towards):02X}" for part in parts)


def _line(turn: int) -> Any:
    """Return the dash pattern of a dense arm; the first one is solid."""
    return "-" if turn == 0 else (0, DASHES[(turn - 1) % len(DASHES)])
