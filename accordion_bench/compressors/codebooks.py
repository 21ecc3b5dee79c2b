"""Codebooks: the levels in [-1, 1] to which normalised coordinates are rounded."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from accordion_bench.options import checks


@functools.lru_cache(maxsize=64)
def uniform(bits: int, zero_level: bool) -> tuple[float, ...]:
    """Return evenly spaced levels; 3 bits: +-1/7, 3/7, 5/7, 1, or 0, +-1/3, 2/3, 1. `uniform(2, True)` is ternary."""
    count = positive_count(bits, zero_level)
    if zero_level:
        return codebook([j / count for j in range(1, count + 1)], zero_level)
    return codebook([(2 * j - 1) / (2 * count - 1) for j in range(1, count + 1)], zero_level)


@functools.lru_cache(maxsize=64)
def exponential(bits: int, zero_level: bool, p: float = 0.5) -> tuple[float, ...]:
    """Return levels +-p^j, j = 0, 1, ..., and 0 if `zero_level`; p in (0, 1)."""
    return codebook([p**j for j in reversed(range(positive_count(bits, zero_level)))], zero_level)


def codebook(positives: Sequence[float], zero_level: bool) -> tuple[float, ...]:
    """Return the full codebook for the given ascending positive levels."""
    negatives = [-level for level in reversed(positives)]
    if zero_level:
        return (*negatives, 0.0, *positives)
    return (*negatives, *positives)


def positive_count(bits: int, zero_level: bool) -> int:
    """Return the number of positive levels, including 1."""
    fewest, kind = (2, "with") if zero_level else (1, "without")
    if bits < fewest:
        raise ValueError(f"a codebook {kind} a zero level needs {fewest} bits")
    if zero_level:
        return 2 ** (bits - 1) - 1
    return 2 ** (bits - 1)


def bits_of(levels: Sequence[float]) -> int:
    """Return the bits per code of a fixed-width code for a codebook."""
    return max(1, math.ceil(math.log2(len(levels))))


def check_codebook(key: str, value: Any) -> tuple[float, ...]:
    """Return a codebook as floats, after checking that it ascends from -1 to 1 and has at most 256 levels.

    Raises:
        ValueRefused: with key, rule, value and a suggestion.
    """
    numbers = isinstance(value, list | tuple) and all(
        isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in value
    )
    levels = tuple(float(x) for x in value) if numbers else ()
    if not 2 <= len(levels) <= 256 or not ascending(levels) or (levels[0], levels[-1]) != (-1.0, 1.0):
        rule = "uniform, exponential, or 2 to 256 numbers in ascending order (in float32) from -1 to 1"
        raise checks.ValueRefused(key, rule, value, _repaired(levels))
    return levels


def ascending(levels: Sequence[float]) -> bool:
    """Whether each level exceeds the previous one in float32."""
    return bool((np.diff(np.array(levels, np.float32)) > 0).all())


def _repaired(levels: tuple[float, ...]) -> list[float] | str:
    """Return the nearest valid codebook to the given levels."""
    inner = sorted({x for x in levels if -1 < x < 1})
    return [-1, *inner, 1] if 0 < len(inner) <= 30 else "uniform"
