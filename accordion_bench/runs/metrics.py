"""Metrics for evaluating runs, validity checks of rows and summaries, and detection of runs that learned nothing."""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accordion_bench.options.units import digits


@dataclass(frozen=True)
class Metric:
    """Description of one metric.

    Args:
        name: column in metrics.jsonl.
        higher_is_better: direction.
        percent: whether it is a share in [0, 1], displayed in percent.
        points: unit of differences; "" = the unit of the values.
        counted: unit in which a data set's `subset` counts the evaluation set.
        least, typical: lower bound of a target that is not a share, and an example of a target.
    """

    name: str
    higher_is_better: bool
    percent: bool
    points: str = ""
    counted: str = "samples"
    least: float = 0.0
    typical: float = 0.9

    @property
    def words(self) -> str:
        """Name in a sentence: `bits per byte`."""
        return self.name.replace("_", " ")

    @property
    def worst(self) -> float:
        """Infinite value that every other value is better than."""
        return -math.inf if self.higher_is_better else math.inf

    def better(self, a: float, b: float) -> bool:
        """Whether a is better than b."""
        return a > b if self.higher_is_better else a < b

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is at least as good as a target."""
        return value >= target if self.higher_is_better else value <= target

    def best(self, values: Iterable[tuple[float, int]]) -> tuple[float, int | None]:
        """Return the best of (value, epoch), the first of equal ones; (`worst`, None) if none is better than that."""
        found: tuple[float, int | None] = self.worst, None
        for value, epoch in values:
            if self.better(value, found[0]):
                found = value, epoch
        return found

    def scaled(self, value: float) -> float:
        """Return the displayed number: percent for shares."""
        return 100 * value if self.percent else value

    @property
    def unit(self) -> str:
        """Unit of the displayed number: `%` or ""."""
        return "%" if self.percent else ""

    def show(self, value: float) -> str:
        """Return the displayed value: `95.61 %`, `97.2`."""
        return f"{100 * value:.2f} %" if self.percent else digits(value, 4)


def split_of(column: str) -> str:
    """Return the split of a metric's column: validation for `validation_accuracy`, `valid_perplexity`; else test."""
    return "validation" if column.startswith("valid") else "test"


PERPLEXITY = Metric("perplexity", False, False, counted="words", least=1.0, typical=100)
# of bytes; perplexity per byte is 2 ** bits_per_byte, and is named apart from the perplexity of words
BITS_PER_BYTE = Metric("bits_per_byte", False, False, "bits", "bytes", typical=2.5)
TOKEN_PERPLEXITY = Metric("token_perplexity", False, False, counted="tokens", least=1.0, typical=30)
OF_TEXTS = (PERPLEXITY, BITS_PER_BYTE, TOKEN_PERPLEXITY)
METRICS = {m.name: m for m in (Metric("accuracy", True, True, "points"), *OF_TEXTS)}
# metrics of a user's own loop whose rows have no other metric
LOSSES = {m.name: m for m in (Metric("test_loss", False, False), Metric("train_loss", False, False))}


def metric(name: str) -> Metric:
    """Return the metric of that name; an unknown name is a number of which more is better."""
    return METRICS.get(name) or LOSSES.get(name) or Metric(name, True, False)


Row = Mapping[str, Any]
SPLITS = ("validation_", "valid_", "test_")  # prefixes of the name of a metric
SPENT = ("_bytes", "_seconds", "_floats", "rounds")  # suffixes of cumulative columns
BY_MEDIANS = ("modelled_", "outlier_")  # prefixes of those that may decrease: a later median counts for all steps
FROM_ZERO = ("epoch", "step", "lr", "seconds")  # other columns that are never negative
# columns of a row that the summary does not repeat
OF_AN_EPOCH = ("epoch", "step", "lr", "plan", "decisions", "norms", "compression_error", "looks")


def is_number(value: Any, or_none: bool = False) -> bool:
    """Whether a value is a number and not a bool; with `or_none`, None counts, too."""
    return (isinstance(value, int | float) and not isinstance(value, bool)) or (or_none and value is None)


def wrong_in_rows(rows: Sequence[Row], whole: bool = True) -> str:
    """Return what is invalid in rows of metrics, as the end of a sentence; "" if nothing is.

    With `whole`, these are all rows of a run, whose epochs count from 0.
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
                    return f"{name} falling from {before} to {value} in the row of epoch {epoch}: it never decreases"
    for row in rows:
        for look in row.get("looks") or []:
            for name, value in look.items():
                least, most, rule = bounds(name)
                if is_number(value) and (value < least or value > most):
                    return f"a look with {name} {value} in the row of epoch {row['epoch']}: it is {rule}"
    return ""


def wrong_in_summary(summary: Row, rows: Sequence[Row]) -> str:
    """Return how the summary of a finished run is invalid or contradicts its rows, as a sentence; "" if it does not.

    Rows may be missing.
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
    best, epoch = judged.best(found)
    if told == (best, epoch):
        return ""
    said = f"summary.json says that {by} was best with {told[0]} in epoch {told[1]}"
    return f"{said}, and metrics.jsonl with {best} in epoch {epoch}"


@functools.lru_cache(1000)
def bounds(name: str) -> tuple[float, float, str]:
    """Return the lower and upper bound of a column, and both in words; non-finite values are results, too."""
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
    return name in ("step", "seconds") or (name.endswith(SPENT) and not name.startswith(BY_MEDIANS))


def _differ(a: float, b: float) -> bool:
    """Whether two numbers differ; NaN equals NaN."""
    return a != b and not (a != a and b != b)


WITHIN = 2.0  # standard errors of a share, within which it cannot be distinguished from chance


def not_learned(
    judged: Metric, value: float, losses: Sequence[float], chance: float | None = None, samples: int = 0
) -> str | None:
    """Return a warning for a run that has learned nothing; None for one that has.

    A share p of n samples has the standard error sqrt(p (1 - p) / n).

    Args:
        judged: the metric.
        value: final value of the metric.
        losses: training loss of each epoch.
        chance: metric of a random guess: 1 / classes, or the size of the vocabulary; None = unknown.
        samples: size of the test set.
    """
    if chance is not None and judged.percent:
        noise = WITHIN * math.sqrt(chance * (1 - chance) / max(samples, 1))
        at_chance = value <= chance + noise
    else:
        at_chance = chance is not None and not judged.better(value, chance)
    if at_chance and chance is not None:
        return (
            f"the {judged.name} is that of a guess ({judged.show(chance)}): nothing has been learned; type another "
            "optimizer.lr, or more epochs"
        )
    if losses and losses[-1] > losses[0]:
        return (
            f"the training loss ended above its start ({losses[-1]:.4g} after {losses[0]:.4g}); type a smaller "
            "optimizer.lr"
        )
    return None
