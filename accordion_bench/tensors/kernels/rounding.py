"""Rounding: what a kernel is told of how coordinates become codes."""

from typing import NamedTuple

import numpy as np

EVEN, SYMMETRIC, ANY, INTEGER, RANDOM_INTEGER, E4M3, E5M2, E3M0, POWERS, SIGNS = range(10)
_NONE = np.empty(0, np.float32)


class KernelRounding(NamedTuple):
    """How coordinates become codes.

    kind: EVEN, SYMMETRIC, ANY: to levels, see `levels`; INTEGER, RANDOM_INTEGER, E4M3, E5M2: 8-bit numbers; E3M0: 4-bit
        ones; POWERS: exponents, and signs as a second stream; SIGNS.
    K: codes of the first stream.
    bits: of a random number, 0 = none.
    scale: of an even grid.
    starts, widths: of the thresholds between levels.
    central: start and width of the threshold that decides on the sign; empty = zero does.
    """

    kind: int
    K: int
    bits: int = 0
    scale: float = 1.0
    starts: np.ndarray = _NONE
    widths: np.ndarray = _NONE
    central: np.ndarray = _NONE
