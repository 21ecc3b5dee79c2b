"""Metrics: what a run is judged by, which direction is better, and how a value is written."""

import math
from dataclasses import dataclass

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
METRICS = {m.name: m for m in (Metric("accuracy", True, True, "points"), PERPLEXITY, BITS_PER_BYTE)}
# what a loop of somebody's own is judged by where its rows have no metric
LOSSES = {m.name: m for m in (Metric("test_loss", False, False), Metric("train_loss", False, False))}


def metric(name: str) -> Metric:
    """The metric of that name; an unknown one counts as a number of which more is better."""
    return METRICS.get(name) or LOSSES.get(name) or Metric(name, True, False)
