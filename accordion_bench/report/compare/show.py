"""Formatting of numbers in all tables and texts: `9.19x less`, `-0.28 ± 1.31`, `1.23 MB`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from accordion_bench.options.units import digits, human_bytes
from accordion_bench.report.compare.intervals import Difference
from accordion_bench.runs.metrics import Metric

NONE = "–"
NOT_COUNTED = "not counted"
NO_DIFFERENCE = "no difference shown"
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
    return f"({number})" if brief else f"{NO_DIFFERENCE} ({number})"


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
    return NO_DIFFERENCE if row[f"{column}_within_noise"] else if_known(row[f"{column}_over_dense"], "{:.2f}x")


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
