"""Intervals over seeds: of a mean, and of the difference of two arms."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

QUANTILE = 0.975  # of Student's t, for two-sided 95 % intervals
PAIRED, WELCH = "paired by seed", "Welch"
ROUNDING = 1e-12  # of the values: a spread below it is the spread of nothing


@dataclass(frozen=True)
class Difference:
    """mean(a) - mean(b), and what may be said about it.

    Args:
        gap: the difference of the means.
        half: half of its 95 % t-interval; NaN where a side has only one value, or the values have no spread at all.
        how: `paired by seed` or `Welch`; "" where there is no interval.
        constant: several values on both sides, and no spread: an interval of width 0 would claim too much.
    """

    gap: float
    half: float
    how: str = ""
    constant: bool = False

    @property
    def shown(self) -> bool | None:
        """Whether the interval excludes 0; None without an interval, unless the values of both are the same."""
        if self.constant and self.gap == 0:
            return False
        return None if math.isnan(self.half) else abs(self.gap) > self.half


NO_DIFFERENCE = Difference(math.nan, math.nan)


def half_width(values: Sequence[float]) -> float:
    """Half of Student's 95 % t-interval of a mean, with n - 1 degrees of freedom; NaN below two values."""
    if len(values) < 2:
        return math.nan
    return float(stdtrit(len(values) - 1, QUANTILE)) * standard_error(values)


def standard_error(values: Sequence[float]) -> float:
    """s / sqrt(n) with the sample's standard deviation s."""
    n = len(values)
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def difference(a: Sequence[float], b: Sequence[float], seeds: Sequence[tuple[object, ...]] = ((), ())) -> Difference:
    """The difference of two arms: paired where both have the same seeds, else Welch's.

    Args:
        a, b: values, one per seed.
        seeds: of `a` and of `b`, in the same order; left out, the values are never paired.
    """
    gap = math.fsum(a) / len(a) - math.fsum(b) / len(b)
    if min(len(a), len(b)) < 2:
        return Difference(gap, math.nan)
    if seeds[0] and seeds[0] == seeds[1] and None not in seeds[0]:
        return _unless_constant(gap, half_width([x - y for x, y in zip(a, b, strict=True)]), PAIRED, a, b)
    return _unless_constant(gap, _welch_half(a, b), WELCH, a, b)


def _welch_half(a: Sequence[float], b: Sequence[float]) -> float:
    """Half of Welch's 95 % t-interval, with Satterthwaite's degrees of freedom."""
    variances = standard_error(a) ** 2, standard_error(b) ** 2
    if sum(variances) == 0:
        return 0.0
    freedom = sum(variances) ** 2 / sum(v**2 / (len(x) - 1) for v, x in zip(variances, (a, b), strict=True))
    return float(stdtrit(freedom, QUANTILE)) * math.sqrt(sum(variances))


def _unless_constant(gap: float, half: float, how: str, a: Sequence[float], b: Sequence[float]) -> Difference:
    if half > ROUNDING * max(map(abs, (*a, *b))):
        return Difference(gap, half, how)
    return Difference(gap, math.nan, constant=True)
