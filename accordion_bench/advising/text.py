"""Format advice as text, CSV and JSON: the verdict, a table of all methods, assumptions and warnings."""

import csv
import io
import itertools
import json
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from accordion_bench.advising.advice import Advice, AdviceRow, Interval, limit_in_words
from accordion_bench.advising.predict import HIDDEN, LONGEST
from accordion_bench.advising.simulation import Late, Wanted
from accordion_bench.advising.verdict import HALF, SPOKEN
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.units import counted, human_bytes, human_rate

WIDTH = 110  # characters per line of text
FEWEST = 3  # columns on a narrow terminal
TOLD = 3  # fastest methods of unknown accuracy whose measuring command is printed
_PERIODS = "the shortest period in which the exchange of a local method adds less than 5 % to its steps"
FORMAT = 1  # version of advice.json
TEXT, CSV, JSON = "advice.txt", "advice.csv", "advice.json"


class AdviceColumn(NamedTuple):
    """One column of the table."""

    name: str  # heading
    cell: Callable[[AdviceRow], str]  # function from a row to the cell's text
    told: str = ""  # explanation as a clause; "" = the heading is sufficient


@dataclass(frozen=True)
class Unit:
    """Unit of durations in a table: `s` or `ms`; `factor` = units per second."""

    name: str
    factor: float

    def show(self, seconds: float) -> str:
        return digits(self.factor * seconds)

    def interval(self, seconds: Interval) -> str:
        """Format a duration as `12.3 (12.1 to 12.6)`, or `12.3` if its interval is unknown."""
        return _between(seconds, self.show)


def text(advice: Advice, columns: Sequence[AdviceColumn] | None = None, width: int = WIDTH) -> str:
    """Return the advice with its verdict as text, the answer first, with these columns or all."""
    shown = columns_of(advice) if columns is None else columns
    parts = [
        "\n".join(_wrapped(sentence, width) for sentence in advice.verdict),
        table(advice, shown),
        "\n".join(_wrapped(line, width) for line in notes(advice, shown)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def short_text(advice: Advice, width: int) -> str:
    """Return the advice as text with few columns, for a terminal; those that do not fit are dropped, last first."""
    columns = few_columns(advice)
    while len(columns) > FEWEST and max(map(len, table(advice, columns).splitlines())) > width:
        columns.pop()
    return text(advice, columns, min(WIDTH, width))


def table(advice: Advice, columns: Sequence[AdviceColumn]) -> str:
    """Return the table with one line per method, the fastest first."""
    lines = [[column.name for column in columns], *([column.cell(row) for column in columns] for row in advice.rows)]
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Align lines of cells, the heading first. The first and last column are aligned left, all others right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (0, len(widths) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def unit_of(advice: Advice) -> Unit:
    """Return seconds if a step computes for at least one second, otherwise milliseconds."""
    return Unit("s", 1.0) if advice.compute.value >= 1 else Unit("ms", 1e3)


def columns_of(advice: Advice) -> list[AdviceColumn]:
    """Return all columns; the period only if there are local methods."""
    unit = unit_of(advice)
    columns = [
        AdviceColumn("method", lambda row: SPOKEN.get(row.method, row.method)),
        AdviceColumn(f"step, {unit.name}", lambda row: unit.interval(row.step), f"modelled{_intervals(advice)}"),
        AdviceColumn("x dense fp32", lambda row: times(row.over_fp32)),
        AdviceColumn("x dense bf16", lambda row: times(row.over_bf16)),
        _exposed(unit),
        AdviceColumn("payload", lambda row: human_bytes(row.payload_bytes), "payload bytes of a worker per step"),
        _ON_THE_LINK,
        AdviceColumn("memory", lambda row: human_bytes(row.memory_bytes), "state of the method in a worker"),
        _FASTER,
    ]
    if any(row.local for row in advice.rows):
        columns.append(AdviceColumn("period", _period, f"{_PERIODS}, up to {LONGEST}"))
    return [*columns, _ACCURACY]


def few_columns(advice: Advice) -> list[AdviceColumn]:
    """Return six columns, the least important last; accuracy, if known for some method, replaces exposed time."""
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
    return ", with its 95 % interval" if any(row.step.low != row.step.high for row in advice.rows) else ""


def _exposed(unit: Unit) -> AdviceColumn:
    what = "time that communication and codec add to the step"
    return AdviceColumn(f"exposed, {unit.name}", lambda row: unit.show(row.exposed.value), what)


_ON_THE_LINK = AdviceColumn("on the link", lambda row: human_bytes(row.wire_bytes), "bytes per worker and step")
_FASTER = AdviceColumn(
    "faster than bf16",
    lambda row: "" if row.method == HALF else break_even(row.break_even_bf16),
    "the bandwidths at which it beats dense bf16",
)
_ACCURACY = AdviceColumn("accuracy against dense", lambda row: row.accuracy or "not known")


def _with_period(row: AdviceRow) -> str:
    shown = row.local and not row.every_local_step and "H " not in row.method
    return f"{SPOKEN.get(row.method, row.method)}{f', H {row.period}' if shown else ''}"


def _period(row: AdviceRow) -> str:
    share = row.exposed.value / row.step.value
    too_short = row.period >= LONGEST and share >= HIDDEN
    return f"{row.period}, {100 * share:.0f} % exposed" if too_short else str(row.period)


def notes(advice: Advice, columns: Sequence[AdviceColumn]) -> list[str]:
    """Return lines on the timed step, the columns, the methods left out and the reasons for doubt."""
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
    """Format a number with three significant digits and no exponent: `0.00123`, `12.3`, `4560`."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    places = 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):.{max(0, min(places, 6))}f}"


def times(ratio: Interval) -> str:
    """Format a ratio as `1.23 (1.20 to 1.26)`, or `1.23` if the interval has no width."""
    return _between(ratio, digits)


def _between(number: Interval, show: Callable[[float], str]) -> str:
    return show(number.value) + ("" if number.low == number.high else f" ({show(number.low)} to {show(number.high)})")


def break_even(bits: float) -> str:
    """Format a break-even bandwidth: `below 1.3 Gbit/s`, `never`, `always`, `only on fast links`."""
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
    """Wrap a line; indented commands stay on one line, so that they can be copied."""
    return line if line.startswith("  ") else "\n".join(textwrap.wrap(line, width, break_on_hyphens=False))


def simulated_text(late: Sequence[Late], advice: Advice, wanted: Wanted) -> str:
    """Return simulated runs with late workers as a table with an introductory sentence."""
    unit = unit_of(advice)
    head = ("method", f"step, {unit.name}", "without", "whole run, s", "waiting", "exposed", "left out")
    lines = [
        (
            SPOKEN.get(one.row.method, one.row.method),
            unit.interval(one.found.step),
            unit.show(one.row.step.value),
            f"{one.found.wall:.4g}",
            f"{100 * one.found.waiting_share:.1f} %",
            f"{100 * one.found.exposed_share:.1f} %",
            f"{one.found.left_out.sum() / (one.found.exchanges * advice.workers):.1%}".replace("%", " %"),
        )
        for one in late
    ]
    run = wanted.settings
    said = f"With late workers, simulated: {run.steps} steps, seed {run.seed}; brackets hold 95 % of the steps."
    table = [head, *lines] if any(one.found.left_out.any() for one in late) else [line[:-1] for line in (head, *lines)]
    return f"{said}\n\n{aligned(table)}\n"


def refuse_taken(out: Path) -> None:
    """Raise ValueRefused for a folder that already contains advice or cannot be created; no new folder remains."""
    if (out / JSON).exists():
        raise ValueRefused("--out", "a folder without advice in it", out, _free(out))
    try:
        new = not out.exists()
        out.mkdir(parents=True, exist_ok=True)
        if new:
            out.rmdir()
    except OSError as error:
        rule = f"a folder that can be made ({error.strerror})"
        raise ValueRefused("--out", rule, out, "results/advice_runs/new") from None


def write(advice: Advice, out: Path, timed_with: Mapping[str, Any], said: str) -> None:
    """Write the text `said`, CSV and JSON into a folder, which is created if necessary.

    `timed_with` has versions, device, cores, threads and commit, to repeat the timing.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / TEXT).write_text(said, encoding="utf-8")
    (out / CSV).write_text(as_csv(advice), encoding="utf-8")
    (out / JSON).write_text(as_json(advice, timed_with), encoding="utf-8")


def as_csv(advice: Advice) -> str:
    """Return the advice as CSV, one line per method."""
    rows = [row.flat() for row in advice.rows]
    written = io.StringIO()
    table = csv.DictWriter(written, fieldnames=list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return written.getvalue()


def as_json(advice: Advice, timed_with: Mapping[str, Any]) -> str:
    """Return the advice as JSON; its rows equal those of the CSV."""
    told = {"format": FORMAT, **asdict(advice), "workers": advice.workers}
    told |= {
        "compute": advice.compute._asdict(),
        "rows": [row.flat() for row in advice.rows],
        "pays": advice.pays and {"below": limit_in_words(advice.pays.below) or advice.pays.below, "on": advice.pays.on},
        "timed_with": {**timed_with},
    }
    return json.dumps(told, indent=1, allow_nan=False) + "\n"


def _free(out: Path) -> Path:
    others = (out.with_name(f"{out.name}-{count}") for count in itertools.count(2))
    return next(other for other in others if not other.exists())
