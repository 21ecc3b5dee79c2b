"""Confidence intervals over seeds, the rankings that they support, and formatting of numbers: `-0.28 ± 1.31`.

Arms are never ranked by means alone.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from scipy.special import stdtrit

from accordion_bench.options.units import digits, human_bytes
from accordion_bench.report.compare.arms import Arm
from accordion_bench.runs.metrics import Metric, metric

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


def pareto_front(arms: Sequence[Arm], cost: str) -> list[Arm]:
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


# ---- formatting of numbers in all tables and texts


NONE = "–"
NOT_COUNTED = "not counted"
NOT_SHOWN = "no difference shown"
LINES = 20  # largest number of lines shown of a list
MANY = 10  # largest number of names shown in a row; others are only counted
SAME, NEARLY_SAME = "the same", "the same to within 0.5 %"
ONE = 1.005  # smaller factors are written as 1
LEAST = "less than 0.01"
BILLIONS = 1e10  # floats from which on the unit is billions

Row = Mapping[Any, Any]


def show_value(judged: Metric, value: float, half: float = math.nan) -> str:
    """Format a value: `91.00 ± 2.48 %`, `97.62 ± 1.3`; without interval `91.00 %`."""
    if math.isnan(half):
        return judged.show(value)
    if judged.percent:
        return f"{judged.scaled(value):.2f} ± {judged.scaled(half):.2f} {judged.unit}"
    return f"{judged.show(value)} ± {digits(half, 2)}"


def show_difference(judged: Metric, row: Row, brief: bool = False) -> str:
    """`-2.50 ± 1.19`; if the interval contains 0 `no difference shown (-0.28 ± 1.31)`, brief `(-0.28 ± 1.31)`."""
    gap, half = row[f"{judged.name}_minus_dense"], row[f"{judged.name}_minus_dense_ci95"]
    if math.isnan(gap):
        return NONE
    number = _gap(judged, gap, half)
    if row["difference_shown"] != "no":
        return number
    return f"({number})" if brief else f"{NOT_SHOWN} ({number})"


def signed(judged: Metric, gap: float) -> str:
    """Format a difference with its sign: `-0.28`, `+1.3`."""
    return f"{judged.scaled(gap):+.2f}" if judged.percent else f"{'+' * (gap >= 0)}{digits(gap)}"


def size(judged: Metric, gap: float) -> str:
    """Format a difference without its sign: `0.28`, `1.3`; `less than 0.01` if only rounding makes it 0."""
    return LEAST if _tiny(judged, gap) else signed(judged, abs(gap)).removeprefix("+")


def show_gap(judged: Metric, found: Difference) -> str:
    """Format a difference with its interval: `-0.28 ± 1.31 points`, `-0.28 points`; without unit `+7.95 ± 0.41`."""
    return in_points(judged, _gap(judged, found.gap, found.half))


def _gap(judged: Metric, gap: float, half: float) -> str:
    """Format `-0.28 ± 1.31`; `less than 0.01` if the difference and its interval are."""
    if _tiny(judged, gap) and (math.isnan(half) or not round(judged.scaled(half), 2)):
        return LEAST
    return signed(judged, gap) + ("" if math.isnan(half) else f" ± {size(judged, half)}")


def _tiny(judged: Metric, gap: float) -> bool:
    """Whether a non-zero difference would be written as 0.00."""
    return judged.percent and bool(gap) and not round(judged.scaled(gap), 2)


def in_points(judged: Metric, number: str) -> str:
    """Append the unit of differences: points of accuracy, bits; nothing for a perplexity."""
    return f"{number} {judged.points}".rstrip()


def listed(items: Sequence[str], most: int = MANY) -> str:
    """Join at least one item: `a`, `a and b`, `a, b and 3 more`; `most` are shown, or one more if it is the last."""
    shown = list(items) if len(items) <= most + 1 else [*items[:most], f"{len(items) - most:,} more"]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def show_seeds(seeds: Sequence[int | None]) -> str:
    """Format seeds: `0, 1, 2`; many consecutive ones as `0 to 999`, many others as their number."""
    different = list(dict.fromkeys(seeds))
    if len(different) <= MANY:
        return ", ".join(map(str, different))
    known = [seed for seed in different if seed is not None]
    follow = len(known) == len(different) == max(known) - min(known) + 1
    return f"{min(known)} to {max(known)}" if follow else f"{len(different):,} different ones"


def show_times(times_less: float) -> str:
    """Format a ratio: 9.19 as `9.19x less`, 0.5 as `2x MORE`; NaN, an unknown ratio, as a dash.

    A factor below 1.005, which three digits write as 1, is shown as the same to within 0.5 %.
    """
    if math.isnan(times_less):
        return NONE
    if math.isinf(times_less):
        return "nothing sent"
    if times_less == 1:
        return SAME
    factor = max(times_less, 1 / times_less)
    if factor < ONE:
        return NEARLY_SAME
    return f"{digits(factor)}x {'less' if times_less > 1 else 'MORE'}"


def show_ratio(row: Row, column: str) -> str:
    """Format a time relative to dense: `0.52x`, or that no difference was shown."""
    return NOT_SHOWN if row[f"{column}_within_noise"] else if_known(row[f"{column}_over_dense"], "{:.2f}x")


def show_floats(count: float) -> str:
    """Format a count of floats: `2418.4 M`, `328.51 B`, in millions or billions as papers count."""
    return f"{count / 1e9:.5g} B" if count >= BILLIONS else f"{count / 1e6:.5g} M"


def show_bytes(count: float) -> str:
    """Format bytes: `1.23 MB`; NaN, for a third-party hook, as `not counted`."""
    return NOT_COUNTED if math.isnan(count) else human_bytes(count)


def if_known(value: float, form: str) -> str:
    """Format a number by a template such as `{:.2f}x`; NaN as a dash."""
    return NONE if math.isnan(value) else form.format(value)


def show_seconds(value: float, half: float = math.nan) -> str:
    """Format seconds: `12.3 ± 0.4 s`; NaN as a dash."""
    if math.isnan(value):
        return NONE
    places = 1 if value >= 1 else 2
    return f"{value:.{places}f} s" if math.isnan(half) else f"{value:.{places}f} ± {half:.{places}f} s"


def three_digits(value: float) -> str:
    """Format a number with three significant digits, or all digits before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".rstrip(".")


def first(lines: Sequence[str]) -> list[str]:
    """Return the first lines of a long list and the number of the others; a short list completely."""
    if len(lines) <= LINES + 1:
        return list(lines)
    return [*lines[:LINES], f"... and {len(lines) - LINES:,} more"]
