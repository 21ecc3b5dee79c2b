"""Predictions compared with measurements: errors, orders of arms, and the causes of errors; Markdown."""

import fnmatch
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accordion_bench.options.checks import ConfigError
from scripts.studies.advice_cells import ALONE, CELL, Cell, find

NEAR = 0.15  # relative error that is a miss beyond
MEDIAN, SHARE = 0.08, 0.9  # aimed at: median error, share of errors within NEAR
APART = 0.10  # two arms that differ by more must come out in the right order
PARTS = ("compute", "encode", "comm", "decode", "exposed")
UNKNOWN = "not known"


@dataclass(frozen=True)
class Compared:
    """One arm of one cell; seconds of a step.

    Args:
        model, hosts, rate, arm: identity of the cell and the arm.
        times: measured times, one per round.
        predicted, low, high: predicted time and the ends of its interval.
        measured_parts, predicted_parts: seconds by `PARTS`; {} = unknown.
    """

    model: str
    hosts: int
    rate: str
    arm: str
    times: tuple[float, ...]
    predicted: float
    low: float
    high: float
    measured_parts: Mapping[str, float]
    predicted_parts: Mapping[str, float]

    @property
    def measured(self) -> float:
        """Median of the measured times."""
        return statistics.median(self.times)

    @property
    def error(self) -> float:
        """Predicted time divided by the measured time, minus 1."""
        return self.predicted / self.measured - 1

    @property
    def cell(self) -> tuple[str, int, str]:
        """Model, hosts, rate."""
        return self.model, self.hosts, self.rate


def joined(measured: Sequence[Cell], predicted: Sequence[Cell]) -> list[Compared]:
    """Return every arm that is both measured and predicted."""
    found = []
    for cell in measured:
        where = {key: cell[key] for key in CELL}
        for name, arm in cell["arms"].items():
            row = find(predicted, **where, arm=name)
            if row is not None:
                told = [row[key] for key in ("seconds", "low", "high")]
                parts = {} if name == "DDP" else arm["parts"]  # no clock tells its communication from computing
                found.append(Compared(*where.values(), name, tuple(arm["seconds"]), *told, parts, row["parts"]))
    return found


def wrong_orders(rows: Sequence[Compared]) -> tuple[list[tuple[Compared, Compared]], int]:
    """Return (pairs (faster, slower) of arms in a cell that were predicted in the wrong order or equal, number of
    pairs).

    Only arms that differ by more than `APART` are compared.
    """
    wrong, count = [], 0
    for one, other in itertools.combinations(rows, 2):
        faster, slower = sorted((one, other), key=lambda row: row.measured)
        if one.cell == other.cell and slower.measured > (1 + APART) * faster.measured:
            count += 1
            if faster.predicted >= slower.predicted:
                wrong.append((faster, slower))
    return wrong, count


# ---- causes


def causes(path: Path) -> list[list[str]]:
    """Return the rows `| arm | model | hosts | rate | cause |` of a page, in which * matches anything."""
    if not path.exists():
        return []
    lines = re.findall(r"^\|(.*)\|$", path.read_text(encoding="utf-8"), re.MULTILINE)
    rows = [[word.strip() for word in line.split("|")] for line in lines]
    return [row for row in rows if len(row) == 5 and row[0] != "arm" and not set(row[0]) <= set("-:")]


def cause(row: Compared, known: Iterable[Sequence[str]]) -> str:
    """Return the first cause that matches."""
    words = [row.arm, row.model, str(row.hosts), row.rate]
    fits = (said for *patterns, said in known if all(map(fnmatch.fnmatchcase, words, patterns)))
    return next(fits, UNKNOWN)


# ---- Markdown


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows), ""]


def percent(share: float) -> str:
    """With its sign."""
    return f"{100 * share:+.1f} %"


def ms(seconds: float | None) -> str:
    """Return milliseconds; a dash if the value is unknown."""
    return "-" if seconds is None else f"{1e3 * seconds:.1f}"


def hosts_of(row: Compared | Cell, cores: int) -> str:
    """Return the number of hosts, as `4 hosts (*)` if there are more than cores."""
    hosts = row["hosts"] if isinstance(row, dict) else row.hosts
    return f"{hosts} hosts" + (" (*)" if hosts > cores else "")


def of_cell(rows: Sequence[Compared]) -> list[str]:
    """Return all arms of a cell."""
    from scripts.bench.harness import quartiles

    lines = []
    for row in rows:
        median, lower, upper = quartiles(row.times)
        taken = f"{ms(median)} ({ms(lower)} to {ms(upper)})"
        told = f"{ms(row.predicted)} ({ms(row.low)} to {ms(row.high)})"
        lines.append([row.arm, taken, len(row.times), told, percent(row.error)])
    return table(["arm", "measured, ms (quartiles)", "n", "predicted, ms (interval)", "error"], lines)


def score(rows: Sequence[Compared]) -> list[object]:
    """Return count, median |error|, share within `NEAR`, median error."""
    errors = [row.error for row in rows]
    within = sum(abs(error) <= NEAR for error in errors)
    usual = statistics.median(map(abs, errors))
    return [len(rows), f"{100 * usual:.1f} %", f"{within} of {len(rows)}", percent(statistics.median(errors))]


def by(rows: Sequence[Compared], what: str, key: Callable[[Compared], Any]) -> list[str]:
    """Return one line of scores per group."""
    groups: dict[Any, list[Compared]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    lines = [[name, *score(group)] for name, group in groups.items()]
    return table([what, "n", "median of errors' sizes", f"within {NEAR:.0%}", "median error"], lines)


def misses(rows: Sequence[Compared], known: Sequence[Sequence[str]], cores: int) -> list[str]:
    """Return every large error, the largest first, with the times of its parts (measured / predicted) and its cause."""
    lines = []
    for row in sorted(rows, key=lambda row: -abs(row.error)):
        if abs(row.error) > NEAR:
            parts = [f"{ms(row.measured_parts.get(p))} / {ms(row.predicted_parts.get(p))}" for p in PARTS]
            where = [row.arm, row.model, hosts_of(row, cores), row.rate]
            lines.append([*where, percent(row.error), *parts, cause(row, known)])
    head = ["arm", "model", "hosts", "rate", "error", *(f"{part}, ms" for part in PARTS), "cause"]
    return table(head, lines) if lines else ["None.", ""]


def orders(wrong: Sequence[tuple[Compared, Compared]], cores: int) -> list[str]:
    """Return each pair in the wrong order with both times."""
    lines = [
        [
            *(f"{a.arm}, {b.arm}", a.model, hosts_of(a, cores), a.rate),
            *(f"{ms(a.measured)}, {ms(b.measured)}", f"{ms(a.predicted)}, {ms(b.predicted)}"),
        ]
        for a, b in wrong
    ]
    return table(["pair", "model", "hosts", "rate", "measured, ms", "predicted, ms"], lines) if lines else ["None.", ""]


def overall(rows: Sequence[Compared]) -> list[str]:
    """Return the targets and the results."""
    wrong, pairs = wrong_orders(rows)
    usual = statistics.median(abs(row.error) for row in rows)
    near = sum(abs(row.error) <= NEAR for row in rows)
    apart = f"wrong orders of arms that differ by more than {APART:.0%}"
    lines = [
        ("median of errors' sizes", f"{100 * usual:.1f} %", f"{MEDIAN:.0%}", usual <= MEDIAN),
        (f"within {NEAR:.0%}", f"{near} of {len(rows)}", f"{SHARE:.0%}", near >= SHARE * len(rows)),
        (apart, f"{len(wrong)} of {pairs} pairs", "none", not wrong),
    ]
    return table(["what", "found", "aimed at", ""], [[*words, "met" if met else "MISSED"] for *words, met in lines])


# ---- what the machine did


STEADY = (
    f"Steady: `{ALONE}`, which needs no model, took as long as in the trial, within {NEAR:.0%}. Where it did not, the "
    "machine was another one than at the trial."
)


def steadiness(everything: Iterable[Compared]) -> Callable[[Compared], str]:
    """Return how the speed of a cell's machine compares with the trial, as far as that was measured."""
    errors = {row.cell: row.error for row in everything if row.arm == ALONE}
    return lambda row: "steady" if abs(errors.get(row.cell, math.inf)) <= NEAR else "changed"


# ---- how well a measurement foretells a measurement


def repeated(measured: Sequence[Cell], earlier: Sequence[Cell]) -> list[Compared]:
    """Return every arm that was measured twice, with the earlier launch as its prediction."""
    told = [
        {**{key: cell[key] for key in CELL}, "arm": name, "parts": {}, **dict.fromkeys(("low", "high"), math.nan)}
        | {"seconds": statistics.median(arm["seconds"])}
        for cell in earlier
        for name, arm in cell["arms"].items()
    ]
    return joined(measured, told)


def repetition(measured: Sequence[Cell], earlier: Sequence[Cell], cores: int) -> list[str]:
    """Return the same scores for an earlier launch of the same cells, the best accuracy that a prediction can reach."""
    everything = repeated(measured, earlier)
    rows = [row for row in everything if row.arm != ALONE]
    when = sorted(cell["about"]["started"][:10] for cell in earlier)
    lines = ["## The same cells measured twice", ""]
    lines += [f"An earlier launch of each ({when[0]} to {when[-1]}) in the place of the prediction.", ""]
    lines += by(everything, "arm", lambda row: row.arm)
    lines += by(rows, "hosts", lambda row: hosts_of(row, cores))
    wrong, pairs = wrong_orders(rows)
    return [*lines, *by(rows, "all arms", lambda row: "all"), f"Wrong orders: {len(wrong)} of {pairs} pairs.", ""]


def page(
    measured: Sequence[Cell],
    predicted: Sequence[Cell],
    known: Sequence[Sequence[str]],
    earlier: Sequence[Cell] = (),
) -> str:
    """Return the whole page in Markdown.

    Args:
        measured: measured cells; those without a prediction are omitted.
        predicted: predicted rows.
        known: causes of errors.
        earlier: cells measured before, in another launch.

    Raises:
        ConfigError: no measured arm was predicted.
    """
    everything = joined(measured, predicted)
    rows = [row for row in everything if row.arm != ALONE]
    if not rows:
        raise ConfigError(
            "measured.json.xz and predicted.json.xz must have cells in common, got none; type python -m "
            "scripts.studies.validate_advice predict after trial and probe of the same models and links"
        )
    about = measured[-1]["about"]
    cores = about["cpu_cores"]
    lines = [f"{about['processor']}, {cores} cores, Python {about['python']}, torch {about['versions']['torch']}.", ""]
    lines += [f"(*): more hosts than the {cores} cores that they share.", ""]
    lines += ["## Overall", "", *overall(rows)]
    lines += ["## By method", "", *by(everything, "arm", lambda row: row.arm)]
    lines += ["## By the machine", "", STEADY, "", *by(rows, "computing alone", steadiness(everything))]
    lines += ["## By hosts", "", *by(rows, "hosts", lambda row: hosts_of(row, cores))]
    lines += ["## By cell", "", *by(rows, "cell", lambda row: f"{row.model}, {hosts_of(row, cores)}, {row.rate}")]
    lines += [f"## Misses of more than {NEAR:.0%}", "", "Parts of a step: measured / predicted.", ""]
    lines += misses(rows, known, cores)
    lines += ["## Wrong orders", "", *orders(wrong_orders(rows)[0], cores)]
    if earlier:
        lines += repetition(measured, earlier, cores)
    lines += ["## Every cell", ""]
    for cell in measured:
        told, key = cell["about"], tuple(cell[name] for name in CELL)
        if all(row.cell != key for row in everything):
            continue
        lines += [f"### {cell['model']}, {hosts_of(cell, cores)}, {cell['rate']}", ""]
        lines += [f"Commit {told['commit'][:7]}, {told['started']}, load before {told['load']}.", ""]
        lines += of_cell([row for row in everything if row.cell == key])
    return "\n".join(lines)
