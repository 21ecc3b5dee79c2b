"""Parameters of rounding, in the format of the kernels."""

from typing import NamedTuple

import numpy as np

EVEN, SYMMETRIC, ANY, INTEGER, RANDOM_INTEGER, E4M3, E5M2, E3M0, POWERS, SIGNS = range(10)
_NONE = np.empty(0, np.float32)


class KernelRounding(NamedTuple):
    """Parameters of rounding from coordinates to codes.

    kind: EVEN, SYMMETRIC, ANY: to levels, see `codecs.rounding`; INTEGER, RANDOM_INTEGER, E4M3, E5M2: to 8-bit numbers;
        E3M0: to 4-bit numbers; POWERS: to exponents, with signs as a second stream; SIGNS.
    K: number of codes of the first stream.
    bits: number of random bits per coordinate; 0 = deterministic.
    scale: scale of an even grid.
    starts, widths: thresholds between levels.
    central: start and width of the threshold for the sign; empty = the threshold is zero.
    """

    kind: int
    K: int
    bits: int = 0
    scale: float = 1.0
    starts: np.ndarray = _NONE
    widths: np.ndarray = _NONE
    central: np.ndarray = _NONE
