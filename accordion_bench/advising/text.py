"""Advice as text, CSV and JSON: the verdict, a table of all methods, and what it rests on."""

import csv
import io
import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from accordion_bench.advising.advice import Advice, AdviceRow, Interval, limit_in_words
from accordion_bench.advising.predict import HIDDEN, LONGEST
from accordion_bench.advising.verdict import HALF, SPOKEN
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.units import counted, human_bytes, human_rate

WIDTH = 110  # letters of a line of sentences
FEWEST = 3  # columns of a narrow terminal
TOLD = 3  # of the fastest methods whose accuracy is not known: the command that would measure it
_PERIODS = "the shortest period in which the exchange of a local method adds less than 5 % to its steps"
FORMAT = 1  # of advice.json
TEXT, CSV, JSON = "advice.txt", "advice.csv", "advice.json"


class AdviceColumn(NamedTuple):
    """One column of the table.

    name: its heading.
    cell: of a row.
    told: what it holds, as a clause; "" = the heading says it.
    """

    name: str
    cell: Callable[[AdviceRow], str]
    told: str = ""


@dataclass(frozen=True)
class Unit:
    """The unit in which a table writes seconds: `s` or `ms`."""

    name: str
    factor: float

    def show(self, seconds: float) -> str:
        return digits(self.factor * seconds)

    def interval(self, seconds: Interval) -> str:
        """`12.3 (12.1 to 12.6)`; `12.3` where it is not known how far it may be off."""
        return _between(seconds, self.show)


def text(advice: Advice, columns: Sequence[AdviceColumn] | None = None, width: int = WIDTH) -> str:
    """The advice as text, the answer first.

    Args:
        advice: with its verdict.
        columns: of the table; None = all.
        width: letters of a line of sentences.
    """
    shown = columns_of(advice) if columns is None else columns
    parts = [
        "\n".join(_wrapped(sentence, width) for sentence in advice.verdict),
        table(advice, shown),
        "\n".join(_wrapped(line, width) for line in notes(advice, shown)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def short_text(advice: Advice, width: int) -> str:
    """The advice as text with few columns, for a terminal. The last columns are left out where they do not fit.

    Args:
        advice: with its verdict.
        width: letters of a line of the terminal.
    """
    columns = few_columns(advice)
    while len(columns) > FEWEST and max(map(len, table(advice, columns).splitlines())) > width:
        columns.pop()
    return text(advice, columns, min(WIDTH, width))


def table(advice: Advice, columns: Sequence[AdviceColumn]) -> str:
    """One line for each method, the fastest first."""
    lines = [[column.name for column in columns], *([column.cell(row) for column in columns] for row in advice.rows)]
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells, the heading first. The first and last column are aligned left, all others right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, len(widths) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def unit_of(advice: Advice) -> Unit:
    """Seconds if a step computes for at least one, else milliseconds."""
    return Unit("s", 1.0) if advice.compute.value >= 1 else Unit("ms", 1e3)


def columns_of(advice: Advice) -> list[AdviceColumn]:
    """All columns; periods only where there are local methods."""
    unit = unit_of(advice)
    columns = [
        AdviceColumn("method", lambda row: SPOKEN.get(row.method, row.method)),
        AdviceColumn(f"step, {unit.name}", lambda row: unit.interval(row.step), f"modelled{_intervals(advice)}"),
        AdviceColumn("x dense fp32", lambda row: times(row.over_fp32)),
        AdviceColumn("x dense bf16", lambda row: times(row.over_bf16)),
        _exposed(unit),
        AdviceColumn("payload", lambda row: human_bytes(row.payload_bytes), "bytes that a worker hands over per step"),
        _ON_THE_LINK,
        AdviceColumn("memory", lambda row: human_bytes(row.memory_bytes), "what the method keeps in a worker"),
        _FASTER,
    ]
    if any(row.local for row in advice.rows):
        columns.append(AdviceColumn("period", _period, f"{_PERIODS}, up to {LONGEST}"))
    return [*columns, _ACCURACY]


def few_columns(advice: Advice) -> list[AdviceColumn]:
    """Six columns, the least important ones last; with accuracies if some are known."""
    unit = unit_of(advice)
    local = any(row.local for row in advice.rows)
    known = any(row.accuracy for row in advice.rows)
    return [
        AdviceColumn("method", _with_period, f"H is {_PERIODS}" if local else ""),
        AdviceColumn(f"step, {unit.name}", lambda row: unit.show(row.step.value), "modelled"),
        AdviceColumn("x bf16", lambda row: times(row.over_bf16), f"times as fast as dense bf16{_intervals(advice)}"),
        _ON_THE_LINK,
        *([_ACCURACY] if known else []),
        _FASTER,
        *([] if known else [_exposed(unit)]),
    ]


def _intervals(advice: Advice) -> str:
    """Words about intervals, which only repeated measurements have."""
    return ", with its 95 % interval" if any(row.step.low != row.step.high for row in advice.rows) else ""


def _exposed(unit: Unit) -> AdviceColumn:
    what = "what of it communication and codec add"
    return AdviceColumn(f"exposed, {unit.name}", lambda row: unit.show(row.exposed.value), what)


_ON_THE_LINK = AdviceColumn("on the link", lambda row: human_bytes(row.wire_bytes), "bytes of a worker per step")
_FASTER = AdviceColumn(
    "faster than bf16",
    lambda row: "" if row.method == HALF else break_even(row.break_even_bf16),
    "the bandwidths at which it beats dense bf16",
)
_ACCURACY = AdviceColumn("accuracy against dense", lambda row: row.accuracy or "not known")


def _with_period(row: AdviceRow) -> str:
    """`DiLoCo, H 30`."""
    shown = row.local and not row.every_local_step and "H " not in row.method
    return f"{SPOKEN.get(row.method, row.method)}{f', H {row.period}' if shown else ''}"


def _period(row: AdviceRow) -> str:
    share = row.exposed.value / row.step.value
    too_short = row.period >= LONGEST and share >= HIDDEN
    return f"{row.period}, {100 * share:.0f} % exposed" if too_short else str(row.period)


def notes(advice: Advice, columns: Sequence[AdviceColumn]) -> list[str]:
    """What was timed, what the columns mean, which methods are left out, and why the advice may be wrong."""
    unit = unit_of(advice)
    link = ", ".join(f"{key} {_option(key, value)}" for key, value in advice.network.items() if value is not None)
    machines = (
        f"{counted(advice.machines, 'machine')} of {counted(advice.workers_per_machine, 'worker')}"
        if advice.workers_per_machine > 1
        else counted(advice.workers, "worker")
    )
    found = [
        f"{advice.model} on {advice.on}: a step computes for {unit.interval(advice.compute)} {unit.name}; "
        f"{machines}; link: {link}.",
        "; ".join(f"{column.name.partition(',')[0]}: {column.told}" for column in columns if column.told) + ".",
    ]
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
    """`1.23 (1.20 to 1.26)`; `1.23` where the interval is no wider."""
    return _between(ratio, digits)


def _between(number: Interval, show: Callable[[float], str]) -> str:
    return show(number.value) + ("" if number.low == number.high else f" ({show(number.low)} to {show(number.high)})")


def break_even(bits: float) -> str:
    """`below 1.3 Gbit/s`, `never`, `always`, `only on fast links`."""
    return limit_in_words(bits) or f"below {human_rate(float(f'{bits:.2g}'))}"


def _option(key: str, value: object) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{k} {_option(k, v)}" for k, v in value.items() if v is not None) + ")"
    if key.endswith("bandwidth") and isinstance(value, int | float):
        return human_rate(value)
    if key in ("latency", "jitter") and isinstance(value, int | float):
        return f"{1e6 * value:g} us"
    return str(value)


def _wrapped(line: str, width: int) -> str:
    """A wrapped line; commands stay on one line, so that they can be copied."""
    return line if line.startswith("  ") else "\n".join(textwrap.wrap(line, width, break_on_hyphens=False))


def refuse_taken(out: Path) -> None:
    """Refuse a folder that holds advice already, or that cannot be made; leaves no new one behind.

    Raises:
        ValueRefused: with another folder.
    """
    if (out / JSON).exists():
        raise ValueRefused("--out", "a folder without advice in it", out, _free(out))
    try:
        new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        if new:
            out.rmdir()
    except OSError as error:
        raise ValueRefused(
            "--out", f"a folder that can be made ({error.strerror})", out, "results/advice_runs/new"
        ) from None


def write(advice: Advice, out: Path, timed_with: Mapping[str, Any], said: str) -> None:
    """Write the three files.

    Args:
        advice: with its verdict.
        out: a folder, made where there is none.
        timed_with: versions, device, cores, threads, commit: what a reader needs to time it again.
        said: the text.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / TEXT).write_text(said, encoding="utf-8")
    (out / CSV).write_text(as_csv(advice), encoding="utf-8")
    (out / JSON).write_text(as_json(advice, timed_with), encoding="utf-8")


def as_csv(advice: Advice) -> str:
    """One line for each method."""
    rows = [row.flat() for row in advice.rows]
    written = io.StringIO()
    table = csv.DictWriter(written, fieldnames=list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return written.getvalue()


def as_json(advice: Advice, timed_with: Mapping[str, Any]) -> str:
    """The advice as JSON; its rows are those of the CSV."""
    told = {"format": FORMAT, **asdict(advice), "workers": advice.workers}
    told |= {
        "compute": advice.compute._asdict(),
        "rows": [row.flat() for row in advice.rows],
        "pays": advice.pays and {"below": limit_in_words(advice.pays.below) or advice.pays.below, "on": advice.pays.on},
        "timed_with": {**timed_with},
    }
    return json.dumps(told, indent=1, allow_nan=False) + "\n"


def _free(out: Path) -> Path:
    """The folder's name with the first number that is not taken."""
    count = 2
    while (other := out.with_name(f"{out.name}-{count}")).exists():
        count += 1
    return other
