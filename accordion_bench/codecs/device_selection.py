"""Selections on a device: the largest of each tensor, or about so many by a sampled threshold; nobody looks at numbers.

Keys order coordinates by magnitude, of equal ones the first: no two are equal, so that all devices agree. A key has the
bits of |x| as a float32 above 32 bits that count down along the row: magnitudes of floating point are ordered as their
bits are, and NaN is above infinity.

For a sampled threshold the largest keys of a section are listed, descending, as many as may be sent and one more: the
first few of them are sent. How few the threshold says: its count is where it falls in the list. The CPU tries one entry
of the sample after the other, and the next one depends on the count at the last one. Here the counts at all of them are
found in one search, hence which one comes after each, and steps of one become steps of 2, 4, 8.

Tensor suffixes: R rows, S sections of a row, Q sections of all rows, K kept entries, L listed keys, M entries of all
samples.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from accordion_bench.codecs.selection import EXPECTED, stride_of
from accordion_bench.tensors.upload import upload

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


def magnitude_bits(x_R: Tensor) -> Tensor:
    """The bits of |x|, int64 [R, T]."""
    return x_R.float().abs().view(torch.int32).long()


def keys_of(x_R: Tensor) -> Tensor:
    """Keys [R, T] of coordinates [R, T], positive."""
    last = POSITIONS - x_R.shape[1]
    return (magnitude_bits(x_R) << 32).add_(torch.arange(POSITIONS, last, -1, device=x_R.device))


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


TINY = bits_at(torch.finfo(torch.float32).tiny)


class WantedEntries(NamedTuple):
    """What of a section is sent.

    cut: so many entries where more than `most` are above the threshold, or none of the sample is low enough.
    most: largest number of entries above the threshold.
    bits: of a threshold that is known.
    least: smallest number of entries above; with fewer the threshold is lowered.
    sample: where the section's sample is; empty = the threshold is known.
    rank: of the sample's entry that is tried first, from 1 on.
    """

    cut: int
    most: int
    bits: int = 0
    least: int = 0
    sample: range = range(0)
    rank: int = 1


def about(n: int, k: int, share: float, least: float, most: float, offset: int) -> WantedEntries:
    """About k of n entries; arguments as of `selection.sampled_top`."""
    if share > 0.5 or k < 2 * EXPECTED:
        return WantedEntries(k, k, bits=1)  # all but zeros
    stride = stride_of(n, math.ceil(max(share * n, EXPECTED * n / k)))
    sample = range(offset % stride, n, stride)
    rank = max(1, round(k * len(sample) / n))
    return WantedEntries(k, math.floor(most * k), 0, math.ceil(least * k), sample, rank)


def above(threshold: float, most: int) -> WantedEntries:
    """The entries that are not below a threshold; of more than `most` the largest."""
    return WantedEntries(most, most, bits_at(threshold))


def listed(n: int, wanted: WantedEntries) -> int:
    """How many of the largest of n entries must be known: what may be sent, and one more to see that it is too much."""
    return min(n, wanted.most + bool(wanted.sample))


def in_order(x_R: Tensor, parts: Sequence[Part]) -> Tensor:
    """Of each section of rows [R, T] the largest keys, descending: [R, L]."""
    return largest(keys_of(x_R), parts, in_order=True)


def chosen(
    x_R: Tensor,
    parts: Sequence[Part],
    wanted_S: Sequence[WantedEntries],
    lists: Callable[[Tensor, Sequence[Part]], Tensor] = in_order,
) -> tuple[Tensor, Tensor]:
    """Which entries are sent.

    Args:
        x_R: coordinates [R, T].
        parts: the sections of a row, with what must be `listed` of each.
        wanted_S: what of each section is sent.
        lists: computes what `in_order` does.

    Returns:
        how many of each section [R, S], int64; their positions [R, L], ascending, with anything behind them.
    """
    device = x_R.device
    lists_R = lists(x_R, parts)
    kept = np.repeat([part.kept for part in parts], [part.sections for part in parts])
    table = upload(torch.from_numpy(_table(len(x_R), kept, wanted_S)), device)
    listed_end, list_start = table[0], table[4]

    # sections ascend, and magnitudes descend in each
    number_L = torch.arange(lists_R.numel(), device=device)
    section_L = torch.searchsorted(listed_end, number_L, right=True)
    ascending = (section_L << 32) - bits_of(lists_R).flatten()
    counts_Q = _counts(ascending, _thresholds(x_R, parts, wanted_S, table), table, wanted_S)

    sent_L = number_L < (list_start + counts_Q).index_select(0, section_L)
    positions_R = torch.where(sent_L.view(lists_R.shape), positions_of(lists_R), POSITIONS).sort(dim=1).values
    return counts_Q.view(len(x_R), -1), positions_R


def _table(rows: int, kept_S: np.ndarray, wanted_S: Sequence[WantedEntries]) -> np.ndarray:
    """Numbers of the host for each section of all rows, [12, Q]."""
    sampled_S = np.array([len(w.sample) for w in wanted_S])
    kept, sampled = np.tile(kept_S, rows), np.tile(sampled_S, rows)
    cut, most, bits, least, rank = (
        np.tile([getattr(w, name) for w in wanted_S], rows) for name in ("cut", "most", "bits", "least", "rank")
    )
    # to each sample one number is added: the threshold that is known, or 0, which comes last and is never tried
    end = (sampled + 1).cumsum()
    first = end - sampled - 1
    known = (np.arange(len(end)) << 32) - bits
    last = first + np.maximum(sampled, 1) - 1
    columns = [kept.cumsum(), sampled.cumsum(), end, known, kept.cumsum() - kept, first, last, first + rank - 1]
    return np.stack([*columns, least, most, cut]).astype(np.int64)


def _thresholds(x_R: Tensor, parts: Sequence[Part], wanted_S: Sequence[WantedEntries], table: Tensor) -> Tensor:
    """Samples and known thresholds, in the order of `lists`: [M]."""
    _, sampled_end, _, known, *_ = table.unbind(0)
    starts = [part.start + g * part.size for part in parts for g in range(part.sections)]
    pieces = [
        x_R[:, start + w.sample.start : start + w.sample.stop : w.sample.step]
        for start, w in zip(starts, wanted_S, strict=True)
        if w.sample
    ]
    if not pieces:
        return known
    bits = magnitude_bits(torch.cat(pieces, dim=1)).flatten().clamp_min_(TINY)  # zeros are not sent
    sections = torch.searchsorted(sampled_end, torch.arange(len(bits), device=bits.device), right=True)
    return torch.cat([(sections << 32) - bits, known]).sort().values


def _counts(lists: Tensor, thresholds: Tensor, table: Tensor, wanted_S: Sequence[WantedEntries]) -> Tensor:
    """How many entries of each section are sent, [Q]."""
    end, tried_first, most, cut = table[2], table[7], table[9], table[10]
    number = torch.arange(len(thresholds), device=lists.device)
    section = torch.searchsorted(end, number, right=True)
    _, _, _, _, list_start, first, last, _, least, _, k = table.index_select(1, section).unbind(0)
    found = torch.searchsorted(lists, thresholds, right=True) - list_start
    enough = (found >= least) | ((section << 32) - thresholds == TINY)
    rank = number - first + 1
    lower = torch.maximum(rank + 1, (rank * k / found.double()).ceil().long())
    following = torch.where(enough, number, torch.minimum(first + lower - 1, last))
    for _ in range(max(len(w.sample) for w in wanted_S).bit_length()):
        following = following[following]
    final = following[tried_first]
    found, enough = found[final], enough[final]
    return torch.where(enough & (found <= most), found, cut)
