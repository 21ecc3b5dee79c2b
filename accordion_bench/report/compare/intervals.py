"""Confidence intervals over seeds, of a mean and of the difference of two arms, and the rankings that they support.

Arms are never ranked by means alone.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from scipy.special import stdtrit

from accordion_bench.report.compare.arms import Arm
from accordion_bench.runs.metrics import metric

QUANTILE = 0.975  # quantile of Student's t for two-sided 95 % intervals
PAIRED, WELCH = "paired by seed", "Welch"
ROUNDING = 1e-12  # relative to the values: a smaller spread counts as none


@dataclass(frozen=True)
class Difference:
    """mean(a) - mean(b), with its confidence interval.

    Args:
        gap: difference of the means.
        half: half width of its 95 % t-interval; NaN if a side has only one value, or the values have no spread.
        how: `paired by seed` or `Welch`; "" without an interval.
        constant: both sides have several values without spread, so an interval of width 0 would claim too much.
    """

    gap: float
    half: float
    how: str = ""
    constant: bool = False

    @property
    def shown(self) -> bool | None:
        """Whether the interval excludes 0; None without an interval, unless all values are equal."""
        if self.constant and self.gap == 0:
            return False
        return None if math.isnan(self.half) else abs(self.gap) > self.half


NO_DIFFERENCE = Difference(math.nan, math.nan)


def half_width(values: Sequence[float]) -> float:
    """Return the half width of Student's 95 % t-interval of a mean, with n - 1 degrees of freedom; NaN if n < 2."""
    if len(values) < 2:
        return math.nan
    return float(stdtrit(len(values) - 1, QUANTILE)) * standard_error(values)


def standard_error(values: Sequence[float]) -> float:
    """Return s / sqrt(n) with the sample standard deviation s."""
    n = len(values)
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def difference(a: Sequence[float], b: Sequence[float], seeds: Sequence[tuple[object, ...]] = ((), ())) -> Difference:
    """Return the difference of two arms: paired if both have the same seeds, else Welch's.

    Args:
        a, b: values, one per seed.
        seeds: seeds of `a` and of `b`, in the same order; default: the values are never paired.
    """
    gap = math.fsum(a) / len(a) - math.fsum(b) / len(b)
    if min(len(a), len(b)) < 2:
        return Difference(gap, math.nan)
    if seeds[0] and seeds[0] == seeds[1] and None not in seeds[0]:
        return _unless_constant(gap, half_width([x - y for x, y in zip(a, b, strict=True)]), PAIRED, a, b)
    return _unless_constant(gap, _welch_half(a, b), WELCH, a, b)


def _welch_half(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the half width of Welch's 95 % t-interval, with Satterthwaite's degrees of freedom."""
    variances = standard_error(a) ** 2, standard_error(b) ** 2
    if sum(variances) == 0:
        return 0.0
    freedom = sum(variances) ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(variances, (a, b), strict=True))
    return float(stdtrit(freedom, QUANTILE)) * math.sqrt(sum(variances))


def _unless_constant(gap: float, half: float, how: str, a: Sequence[float], b: Sequence[float]) -> Difference:
    if half > ROUNDING * max(map(abs, (*a, *b))):
        return Difference(gap, half, how)
    return Difference(gap, math.nan, constant=True)


MARGIN = 0.02  # tolerated loss: absolute for an accuracy, relative to dense's value for other metrics


class ComparisonOutcome(Enum):
    """Result of comparing an arm with dense, by the interval of their difference."""

    KEEPS = "its worse end is within the margin, and no loss is shown"
    LOSES = "it holds only losses"
    UNDECIDED = "it holds 0, and losses beyond the margin"
    NO_INTERVAL = "there is none"


def against(arm: Arm, other: Arm | None) -> Difference:
    """Return the metric of an arm minus another's, paired by seed if both have the same seeds."""
    if other is None or other is arm:
        return NO_DIFFERENCE
    return difference(arm.values("metric"), other.values("metric"), (tuple(arm.seeds), tuple(other.seeds)))


def shown_better(arm: Arm, other: Arm) -> bool:
    """Whether the interval of the difference contains only gains."""
    found = against(arm, other)
    return bool(found.shown) and metric(arm.metric).better(found.gap, 0)


def standing(arm: Arm, dense: Arm) -> ComparisonOutcome:
    """Return the result of comparing an arm with its baseline."""
    judged, found = metric(arm.metric), against(arm, dense)
    if found.shown is None:
        return ComparisonOutcome.NO_INTERVAL
    if found.shown and not judged.better(found.gap, 0):
        return ComparisonOutcome.LOSES
    return ComparisonOutcome.KEEPS if within_margin(arm, dense) else ComparisonOutcome.UNDECIDED


def within_margin(arm: Arm, dense: Arm) -> bool:
    """Whether the worse end of the interval is within the margin, even if a loss is shown."""
    judged, found = metric(arm.metric), against(arm, dense)
    loss = -found.gap if judged.higher_is_better else found.gap
    margin = MARGIN if judged.percent else MARGIN * abs(dense.mean("metric"))
    return loss + (0.0 if found.constant else found.half) <= margin


def apart(arms: Sequence[Arm]) -> bool:
    """Whether the intervals separate at least two arms."""
    several = [arm for arm in arms if arm.n > 1]
    return any(against(arm, other).shown for arm, other in itertools.combinations(several, 2))


def beaten(arms: Sequence[Arm], cost: str) -> list[int]:
    """Return the indices of arms for which another is shown to be better at no more `cost`, a column of the summary."""
    return [
        i
        for i, arm in enumerate(arms)
        if any(shown_better(other, arm) and _at_most(other, arm, cost) for other in arms)
    ]


def front(arms: Sequence[Arm], cost: str) -> list[Arm]:
    """Return, by ascending `cost` (a column of the summary), the arms shown to be better than all that cost no more."""
    cheaper = {arm.label: [other for other in arms if other is not arm and not _less(arm, other, cost)] for arm in arms}
    best = [arm for arm in arms if all(shown_better(arm, other) for other in cheaper[arm.label])]
    return sorted(best, key=lambda arm: arm.mean(cost))


def _less(arm: Arm, other: Arm, cost: str) -> bool:
    """Whether an arm is shown to cost less than another; bytes that are equal at every seed have no noise."""
    found = difference(arm.values(cost), other.values(cost))
    return found.gap < 0 and (found.constant or bool(found.shown))


def _at_most(arm: Arm, other: Arm, cost: str) -> bool:
    """Whether an arm is shown to cost less than another, or costs exactly the same."""
    return _less(arm, other, cost) or arm.values(cost) == other.values(cost)
