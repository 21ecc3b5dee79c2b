"""What runs are judged by, what rows and summaries of metrics may hold, and whether a run has learned anything."""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accordion_bench.options.units import digits


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        name: the column in metrics.jsonl.
        higher_is_better: direction.
        percent: a share in [0, 1], written in percent.
        points: what differences of it are counted in; "" where its own numbers are all there is.
        counted: what a data set's `subset` counts where it is evaluated.
        least, typical: what a target is at least where it is no share, and an example of one.
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
        """Its name in a sentence: `bits per byte`."""
        return self.name.replace("_", " ")

    @property
    def worst(self) -> float:
        """What every value is better than."""
        return -math.inf if self.higher_is_better else math.inf

    def better(self, a: float, b: float) -> bool:
        """Whether a is better than b."""
        return a > b if self.higher_is_better else a < b

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is at least as good as a target."""
        return value >= target if self.higher_is_better else value <= target

    def scaled(self, value: float) -> float:
        """The number that is written: percent for shares."""
        return 100 * value if self.percent else value

    @property
    def unit(self) -> str:
        """Of the number that is written: `%` or none."""
        return "%" if self.percent else ""

    def show(self, value: float) -> str:
        """`95.61 %`, `97.2`."""
        return f"{100 * value:.2f} %" if self.percent else digits(value, 4)


def split_of(column: str) -> str:
    """The split that a column of a metric is of: `validation_accuracy`, `valid_perplexity`; else the test split."""
    return "validation" if column.startswith("valid") else "test"


PERPLEXITY = Metric("perplexity", False, False, counted="words", least=1.0, typical=100)
# of bytes; their perplexity is 2 to the power of it, and has another name than that of words, which is no byte's
BITS_PER_BYTE = Metric("bits_per_byte", False, False, "bits", "bytes", typical=2.5)
TOKEN_PERPLEXITY = Metric("token_perplexity", False, False, counted="tokens", least=1.0, typical=30)
OF_TEXTS = (PERPLEXITY, BITS_PER_BYTE, TOKEN_PERPLEXITY)
METRICS = {m.name: m for m in (Metric("accuracy", True, True, "points"), *OF_TEXTS)}
# what a user's own loop is judged by where its rows have no metric
LOSSES = {m.name: m for m in (Metric("test_loss", False, False), Metric("train_loss", False, False))}


def metric(name: str) -> Metric:
    """The metric of that name; an unknown one counts as a number of which more is better."""
    return METRICS.get(name) or LOSSES.get(name) or Metric(name, True, False)


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


WITHIN = 2.0  # standard errors of a share, inside which it cannot be told from chance


def not_learned(
    judged: Metric, value: float, losses: Sequence[float], chance: float | None = None, samples: int = 0
) -> str | None:
    """What a run that has learned nothing should be told; None for one that has.

    A share p of n samples has the standard error sqrt(p (1 - p) / n).

    Args:
        judged: the metric.
        value: of it, at the end.
        losses: the training loss of each epoch.
        chance: the metric of a guess: 1 / classes, or the size of the vocabulary; None = unknown.
        samples: of the test set.
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
