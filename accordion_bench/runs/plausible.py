"""What the numbers of a run cannot be: out of their range or order, a sum that falls, a summary of another end.

Checksums tell damage of files that have them; this is what can be told of every file, those of earlier versions and of
somebody's own loop too. It cannot tell whether a number is true.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from accordion_bench.runs.metrics import METRICS, metric

Row = Mapping[str, Any]
SPLITS = ("validation_", "valid_", "test_")  # before the name of a metric
SPENT = ("_bytes", "_seconds", "_floats", "rounds")  # ends of columns of what was spent until then
BY_MEDIANS = ("modelled_", "outlier_")  # begins of those that may fall: a later median counts for all steps
FROM_ZERO = ("epoch", "step", "lr", "seconds")  # others that are never below 0
# of a row, what no summary repeats
OF_AN_EPOCH = ("epoch", "step", "lr", "plan", "decisions", "norms", "compression_error", "looks")


def is_number(value: Any, or_none: bool = False) -> bool:
    """Whether it is a number, or None; no truth value."""
    return (isinstance(value, int | float) and not isinstance(value, bool)) or (or_none and value is None)


def wrong_in_rows(rows: Sequence[Row], whole: bool = True) -> str:
    """What rows of metrics cannot be, as the end of a sentence; "" where they can.

    Args:
        rows: by epoch.
        whole: they are all rows of a run, whose epochs count from 0.
    """
    epochs = [row["epoch"] for row in rows]
    for at, epoch in enumerate(epochs):
        if whole and epoch != at:
            return f"a row of epoch {epoch} where that of epoch {at} belongs"
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [(row["epoch"], row[name]) for row in rows if is_number(row.get(name))]
        least, most, rule = bounds(name)
        for epoch, value in values:
            if value < least or value > most:
                return f"{name} {value} in the row of epoch {epoch}: it is {rule}"
        if _adds_up(name):
            for (_, before), (epoch, value) in itertools.pairwise(values):
                if value < before:
                    return f"{name} falling from {before} to {value} in the row of epoch {epoch}: it only grows"
    for row in rows:
        for look in row.get("looks") or []:
            for name, value in look.items():
                least, most, rule = bounds(name)
                if is_number(value) and (value < least or value > most):
                    return f"a look with {name} {value} in the row of epoch {row['epoch']}: it is {rule}"
    return ""


def wrong_in_summary(summary: Row, rows: Sequence[Row]) -> str:
    """What the summary of a run with these rows cannot say, as a sentence; "" where it can.

    Args:
        summary: of a run that has finished.
        rows: all of them, or those that are left.
    """
    name = str(summary.get("metric_name", "accuracy"))
    for key, value in summary.items():
        least, most, rule = bounds(name if key in ("metric", "best_metric", "test_at_best") else key)
        if is_number(value) and (value < least or value > most):
            return f"summary.json says {key} {value}: it is {rule}"
    if not rows or rows[-1].get("epoch") != summary.get("epochs", 0) - 1:
        return ""
    last = {key: value for key, value in rows[-1].items() if key not in (*OF_AN_EPOCH, name)}
    last |= {"metric": rows[-1].get(name), "steps": rows[-1].get("step")}
    for key, value in last.items():
        if is_number(value) and is_number(summary.get(key)) and _differ(value, summary[key]):
            return f"summary.json says {key} {summary[key]}, and the last row of metrics.jsonl {value}"
    return _wrong_best(summary, rows) if len(rows) == summary["epochs"] else ""


def _wrong_best(summary: Row, rows: Sequence[Row]) -> str:
    judged, by = metric(str(summary.get("metric_name", "accuracy"))), summary.get("selected_by")
    found = [(row[by], row["epoch"]) for row in rows if by is not None and is_number(row.get(by))]
    told = summary.get("best_metric"), summary.get("best_epoch")
    if len(found) < len(rows) or not all(map(is_number, told)):
        return ""
    best, epoch = judged.worst, None
    for value, number in found:
        if judged.better(value, best):
            best, epoch = value, number
    if told == (best, epoch):
        return ""
    said = f"summary.json says that {by} was best with {told[0]} in epoch {told[1]}"
    return f"{said}, and metrics.jsonl with {best} in epoch {epoch}"


@functools.lru_cache(1000)
def bounds(name: str) -> tuple[float, float, str]:
    """The least and the largest value of a column, and both in words; what is not finite is a result, too."""
    judged = METRICS.get(name)
    for split in SPLITS:
        judged = judged or METRICS.get(name.removeprefix(split))
    if judged is not None and judged.percent:
        return 0, 1, "a share from 0 to 1"
    if judged is not None:
        return judged.least, math.inf, f"at least {judged.least:g}"
    if name == "waited_for_cores":
        return 0, 1, "a share from 0 to 1"
    if name in FROM_ZERO or name.endswith(SPENT):
        return 0, math.inf, "at least 0"
    return -math.inf, math.inf, ""


def _adds_up(name: str) -> bool:
    """Whether a column says what was spent since the run began."""
    return name in ("step", "seconds") or (name.endswith(SPENT) and not name.startswith(BY_MEDIANS))


def _differ(a: float, b: float) -> bool:
    """Whether two numbers are others; NaN is itself."""
    return a != b and not (a != a and b != b)
