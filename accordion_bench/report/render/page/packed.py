"""Numbers as short text: 32-bit floats in base64, which the page reads as typed arrays."""

import base64
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

POINTS = 300  # of a curve, at most
TOGETHER = 6000  # of all curves of a page, at most


def packed(values: ArrayLike) -> str:
    """A row of numbers; NaN for what is not known."""
    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()


def rows(values: Iterable[ArrayLike]) -> list[str]:
    """Rows of numbers, each by itself."""
    return [packed(row) for row in values]


def thinned(count: int, most: int) -> list[int]:
    """Which of `count` points stay: the first, the last, and others at equal distances, `most` in all."""
    if count <= most:
        return list(range(count))
    return np.unique(np.linspace(0, count - 1, most).round().astype(int)).tolist()


def most_points(curves: int) -> int:
    """How many points each of so many curves may have."""
    return max(2, min(POINTS, TOGETHER // max(curves, 1)))
