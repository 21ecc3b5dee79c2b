"""Advice as text: the verdict, a table of all methods, and what it rests on."""

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accordion_bench.advising.pipeline import HIDDEN, LONGEST
from accordion_bench.advising.table import Advice, Interval, Row, break_even_in_words
from accordion_bench.advising.verdict import SPOKEN
from accordion_bench.advising.winners import HALF
from accordion_bench.options.units import counted, human_bytes, human_rate

WIDTH = 110  # letters of a line of sentences
TOLD = 3  # of the fastest methods whose accuracy is not known: the command that would measure it

Column = tuple[str, Callable[[Row], str]]


@dataclass(frozen=True)
class Unit:
    """In what a table writes seconds: `s` or `ms`."""

    name: str
    factor: float

    def show(self, seconds: float) -> str:
        return digits(self.factor * seconds)

    def interval(self, seconds: Interval) -> str:
        """`12.3 (12.1 to 12.6)`."""
        return f"{self.show(seconds.value)} ({self.show(seconds.low)} to {self.show(seconds.high)})"


def text(advice: Advice) -> str:
    """Everything, the answer first."""
    parts = [
        "\n".join(_wrapped(sentence) for sentence in advice.verdict),
        table(advice),
        "\n".join(_wrapped(line) for line in notes(advice)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(advice: Advice) -> str:
    """One line for each method, the fastest first."""
    unit = unit_of(advice)
    columns = columns_of(advice, unit)
    lines = [[name for name, _ in columns], *([show(row) for _, show in columns] for row in advice.rows)]
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells, the heading first; the first and the last column begin on the left, numbers end on the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, len(widths) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def unit_of(advice: Advice) -> Unit:
    """Seconds where a step of computing alone takes one."""
    return Unit("s", 1.0) if advice.compute.value >= 1 else Unit("ms", 1e3)


def columns_of(advice: Advice, unit: Unit) -> list[Column]:
    """(heading, cell of a row); periods only where there are local methods."""
    columns: list[Column] = [
        ("method", lambda row: SPOKEN.get(row.method, row.method)),
        (f"step, {unit.name}", lambda row: unit.interval(row.step)),
        ("x dense fp32", lambda row: times(row.over_fp32)),
        ("x dense bf16", lambda row: times(row.over_bf16)),
        (f"exposed, {unit.name}", lambda row: unit.show(row.exposed.value)),
        ("payload", lambda row: human_bytes(row.payload_bytes)),
        ("on the link", lambda row: human_bytes(row.wire_bytes)),
        ("memory", lambda row: human_bytes(row.memory_bytes)),
        ("faster than bf16", lambda row: "" if row.method == HALF else break_even(row.break_even_bf16)),
    ]
    if any(row.local for row in advice.rows):
        columns.append(("period", _period))
    return [*columns, ("accuracy against dense", lambda row: row.accuracy or "not known")]


def _period(row: Row) -> str:
    share = row.exposed.value / row.step.value
    too_short = row.period >= LONGEST and share >= HIDDEN
    return f"{row.period}, {100 * share:.0f} % exposed" if too_short else str(row.period)


def notes(advice: Advice) -> list[str]:
    """What was timed, what the columns are, who was left out, and why all of it may be wrong."""
    unit = unit_of(advice)
    link = ", ".join(f"{key} {_option(key, value)}" for key, value in advice.network.items() if value is not None)
    machines = (
        f"{counted(advice.machines, 'machine')} of {counted(advice.workers_per_machine, 'worker')}"
        if advice.workers_per_machine > 1
        else counted(advice.workers, "worker")
    )
    found = [
        f"{advice.model} on {advice.device}: a step computes for {unit.interval(advice.compute)} {unit.name}; "
        f"{machines}; link: {link}.",
        "step: modelled, with its 95 % interval; exposed: what of it communication and codec add; payload, on the "
        "link: bytes of a worker per step; memory: what the method keeps in a worker; faster than bf16: the bandwidths "
        "at which it beats dense bf16.",
    ]
    if any(row.local for row in advice.rows):
        found.append(
            f"period: the shortest one, up to {LONGEST}, in which a local method's exchange adds less than 5 % to its "
            "steps."
        )
    found += [f"Left out: {method}: {why}." for method, why in advice.left_out.items()]
    unknown = [row for row in advice.rows if not row.accuracy and row.command and row.method != "dense"][:TOLD]
    if unknown:
        found.append("Accuracy is not known here; to measure that of the fastest:")
        found += [f"  {row.command}" for row in unknown]
    return found + [f"Beware: {doubt}." for doubt in advice.doubts]


def digits(value: float) -> str:
    """Three significant digits, never an exponent: `0.00123`, `12.3`, `4560`."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    places = 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):.{max(0, min(places, 6))}f}"


def times(ratio: Interval) -> str:
    """`1.23 (1.20 to 1.26)`."""
    return f"{digits(ratio.value)} ({digits(ratio.low)} to {digits(ratio.high)})"


def break_even(bits: float) -> str:
    """`below 1.3 Gbit/s`, `never`, `always`, `only on fast links`."""
    return break_even_in_words(bits) or f"below {human_rate(float(f'{bits:.2g}'))}"


def _option(key: str, value: object) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{k} {_option(k, v)}" for k, v in value.items() if v is not None) + ")"
    if key.endswith("bandwidth") and isinstance(value, int | float):
        return human_rate(value)
    if key in ("latency", "jitter") and isinstance(value, int | float):
        return f"{1e6 * value:g} us"
    return str(value)


def _wrapped(line: str) -> str:
    """Commands stay on one line, so that they can be copied."""
    return line if line.startswith("  ") else "\n".join(textwrap.wrap(line, WIDTH, break_on_hyphens=False))
