"""Keys that order coordinates by magnitude, of equal ones the first: no two are equal, so that a device must agree.

A key has the bits of |x| as a float32 above 32 bits that count down along the row: magnitudes of floating point are
ordered as their bits are, and NaN is above infinity.

Tensor suffixes: R rows, T coordinates, K kept entries.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

POSITIONS = (1 << 32) - 1


class Part(NamedTuple):
    """Sections of equal size that stand side by side in a row.

    start: of the first.
    sections: how many.
    size: entries of each.
    kept: of them the largest.
    """

    start: int
    sections: int
    size: int
    kept: int


def keys_of(x_R: Tensor) -> Tensor:
    """Keys [R, T] of coordinates [R, T], positive."""
    bits_R = x_R.float().abs().view(torch.int32).long()
    return (bits_R << 32).add_(torch.arange(POSITIONS, POSITIONS - x_R.shape[1], -1, device=x_R.device))


def bits_of(keys: Tensor) -> Tensor:
    """The bits of |x|."""
    return keys >> 32


def positions_of(keys: Tensor) -> Tensor:
    """The coordinates' positions in their row."""
    return ~keys & POSITIONS


def largest(keys_R: Tensor, parts: Sequence[Part], in_order: bool = False) -> Tensor:
    """Of each section of rows [R, T] the largest keys, part by part and section by section: [R, K].

    Args:
        keys_R: keys.
        parts: sections, and how many keys of each are wanted.
        in_order: descending within each section; else in any order.
    """
    found = [keys_R.new_empty(len(keys_R), 0)]
    for start, sections, size, kept in [part for part in parts if part.kept]:
        own_R = keys_R[:, start : start + sections * size].unflatten(1, (sections, size))
        found.append(own_R.topk(kept, dim=2, sorted=in_order).values.flatten(1))
    return torch.cat(found, dim=1)


def bits_at(magnitude: float) -> int:
    """The bits of a number as a float32."""
    return int(np.float32(magnitude).view(np.int32))


def top_positions(x_R: Tensor, parts: Sequence[Part]) -> Tensor:
    """Ascending positions [R, K] of the largest magnitudes of each section of rows [R, T]; ties go to the first."""
    return positions_of(largest(keys_of(x_R), parts)).sort(dim=1).values
