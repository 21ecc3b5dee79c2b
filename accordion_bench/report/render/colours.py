"""How a method is drawn: the same colour and marker in every figure of every report, whatever stands beside it."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from accordion_bench.methods.labels import hook_of, is_dense, knob_of, policies_of
from accordion_bench.report.compare.arms import Arm

# Okabe and Ito (2008), apart under every common colour blindness; without yellow, which is lost on white, with a brown
BLACK, BLUE, ORANGE, PURPLE, GREEN = "#000000", "#0072B2", "#E69F00", "#CC79A7", "#009E73"
SKY, VERMILION, BROWN = "#56B4E9", "#D55E00", "#661100"
HUES = (BLUE, ORANGE, PURPLE, GREEN, SKY, VERMILION, BROWN)
GREY = "#555555"  # of small print
LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (1, 3)), (0, (9, 3)))
FILLS = ("full", "none", "left", "right", "top", "bottom")

# by name in conf/: hue and marker; of Accordion one for each kind of compressor, see `kind_of`
METHODS = {
    "powersgd": (BLUE, "o"),
    "acpsgd": (SKY, "o"),
    "dion": (GREEN, "o"),
    "atomo": (ORANGE, "o"),
    "topk": (GREEN, "s"),
    "randomk": (ORANGE, "s"),
    "threshold": (SKY, "s"),
    "dgc": (PURPLE, "s"),
    "adacomp": (BROWN, "s"),
    "demo": (BLUE, "s"),
    "qsgd": (ORANGE, "^"),
    "qsgdinf": (SKY, "^"),
    "nuqsgd": (GREEN, "^"),
    "trn": (PURPLE, "^"),
    "terngrad": (BROWN, "^"),
    "natural": (BLUE, "^"),
    "signsgd": (ORANGE, "v"),
    "signum": (SKY, "v"),
    "efsignsgd": (GREEN, "v"),
    "distefblocksgd": (PURPLE, "v"),
    "onebit": (BLUE, "v"),
    "onebitadam": (BROWN, "v"),
    "fp16": (SKY, "P"),
    "bf16": (BLUE, "P"),
    "fp8": (GREEN, "P"),
    "fp4": (PURPLE, "P"),
    "int8": (ORANGE, "P"),
    "local_sgd": (BLUE, ">"),
    "post_local_sgd": (GREEN, ">"),
    "slowmo": (ORANGE, ">"),
    "diloco": (PURPLE, ">"),
    "hierarchical": (BROWN, ">"),
    "overlap_local_sgd": (SKY, ">"),
    "streaming_diloco": (PURPLE, "<"),
    "sparta": (ORANGE, "<"),
    "noloco": (GREEN, "<"),
    "zerooneadam": (BLUE, "<"),
    "accordion": (VERMILION, "XPD"),  # a hue of its own
    "accordion_batch": (VERMILION, "*"),
    "accordion_sync": (VERMILION, "<"),
    "adabatch": (SKY, "*"),
    "grow_batch": (GREEN, "*"),
    "noise_scale": (PURPLE, "*"),
    "adacomm": (BROWN, "<"),
    "qsr": (SKY, "<"),
    "alq": (BLUE, "D"),
    "alqn": (BLUE, "d"),
    "alqg": (BLUE, "p"),
    "amq": (PURPLE, "D"),
    "amqn": (PURPLE, "d"),
    "adaqs": (BROWN, "D"),
    "advised": (BLUE, "h"),
    "gravac": (GREEN, "p"),
    "lgreco": (ORANGE, "pdD"),
    "schedule": (SKY, "pdD"),
}
SECOND = {
    "accordion_batch": 3,
    "accordion_sync": 4,
    "alqn": 1,
    "alqg": 2,
    "amqn": 1,
}  # policies of one hue: other lines
SYMBOLS = {  # matplotlib's marker -> plotly's
    "o": "circle",
    "s": "square",
    "^": "triangle-up",
    "v": "triangle-down",
    "<": "triangle-left",
    ">": "triangle-right",
    "P": "cross",
    "X": "x",
    "D": "diamond",
    "d": "diamond-tall",
    "*": "star",
    "p": "pentagon",
    "h": "hexagon",
}
DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
LOW_RANK = ("powersgd", "acpsgd", "atomo", "dion")
ENTRIES = ("topk", "randomk", "threshold", "dgc", "adacomp", "demo")


@dataclass(frozen=True)
class Look:
    """How one arm is drawn.

    Args:
        colour, marker: of its method.
        line, fill: of its level: the line's style, and which part of the marker is filled.
    """

    colour: str
    marker: str
    line: Any = "-"
    fill: str = "full"

    @property
    def point(self) -> dict[str, Any]:
        """Options of a marker without a line."""
        face = {"markerfacecoloralt": "white", "markeredgecolor": self.colour, "markeredgewidth": 0.9}
        return {"color": self.colour, "marker": self.marker, "fillstyle": self.fill, "linestyle": "", **face}

    @property
    def symbol(self) -> str:
        """The marker in plotly's words; half filled ones are open there."""
        return SYMBOLS[self.marker] + ("" if self.fill == "full" else "-open")

    @property
    def dash(self) -> str:
        """The line in plotly's words."""
        return DASHES[self.line] if isinstance(self.line, str) else ",".join(f"{2 * part}px" for part in self.line[1])


def looks(arms: Sequence[Arm]) -> list[Look]:
    """The look of each arm."""
    return looks_of([(arm.label, arm.config) for arm in arms])


def looks_of(named: Sequence[tuple[str, dict[str, Any]]]) -> list[Look]:
    """The look of each (label, configuration); those of one method and level, such as two bucket sizes, get different
    lines and fills."""
    found: dict[int, Look] = {}
    taken = set()
    for i in sorted(range(len(named)), key=lambda i: named[i][0]):  # whatever order they are given in
        (colour, marker), (line, fill) = method(named[i][1]), steps(named[i][1])
        while (look := Look(colour, marker, LINES[line % len(LINES)], FILLS[fill % len(FILLS)])) in taken:
            line, fill = line + 1, fill + 1 + (line + 1) // len(LINES)
            if line > len(LINES) * len(FILLS):
                break  # more than anybody can tell apart
        taken.add(look)
        found[i] = look
    return [found[i] for i in range(len(named))]


def method(config: dict[str, Any]) -> tuple[str, str]:
    """(colour, marker) of a run's policy, or else of its scheme, or else of its compressor; dense is a black circle."""
    if is_dense(config):
        return BLACK, "o"
    choices = config.get("choices") or {}
    compressor, scheme = choices.get("compressor", "none"), choices.get("sync", "every_step")
    own = hook_of(config) or (compressor if scheme == "every_step" else scheme)
    name = next(iter(policies_of(config)), own)
    if name not in METHODS:  # of somebody's own: any, but always the same
        number = zlib.crc32(name.encode())
        return HUES[number % len(HUES)], "os^Dv"[number // len(HUES) % 5]
    colour, markers = METHODS[name]
    return colour, markers[min(kind_of(config), len(markers) - 1)]


def kind_of(config: dict[str, Any]) -> int:
    """0 for compressors by low rank, 1 for those by few entries, 2 for others."""
    compressor = (config.get("choices") or {}).get("compressor")
    if compressor in LOW_RANK:
        return 0
    return 1 if compressor in ENTRIES else 2


def steps(config: dict[str, Any]) -> tuple[int, int]:
    """Which of LINES and of FILLS: of a policy by what it is and stands upon, else by the level."""
    if policies_of(config):
        return SECOND.get(next(iter(policies_of(config))), kind_of(config)), 0
    step = level_step(config)
    return step, step


def level_step(config: dict[str, Any]) -> int:
    """0, 1, 2, ... for ranks and periods 1, 2, 4, ..., bits 2, 3, 4, ..., densities 1, 0.1, 0.01, ..."""
    sync, compressor = config.get("sync") or {}, config.get("compressor") or {}
    knob = knob_of(compressor)
    period: Any = sync.get("period")
    if is_number(period) and period >= 1:
        return round(math.log2(period)) % len(LINES)
    level: Any = compressor.get(knob)
    if not is_number(level) or level <= 0:
        return 0
    if knob == "bits":
        return int(min(max(level - 2, 0), len(LINES) - 1))
    return round(abs(math.log10(level) if knob == "density" else math.log2(level))) % len(LINES)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether an option is a number: not a word, nor absent, nor infinite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
