"""Buckets of a quantiser, and the moments of their normalised coordinates."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Buckets(NamedTuple):
    """Buckets of one worker: norms [B], normalised coordinates r [B, D], and which of these exist [B, D]."""

    norms: Tensor
    r: Tensor
    exists: Tensor


def bucket_table(buckets: Sequence[Buckets]) -> Tensor:
    """Return norm, mean of r, sum of squared deviations of r, and number of coordinates of every bucket: [B, 4]."""
    rows = []
    for norms, r, exists in buckets:
        count = exists.sum(1).double()
        mean = r.double().sum(1) / count
        spread = ((r.double() - mean[:, None]) * exists).square().sum(1)
        rows.append(torch.stack([norms.double(), mean, spread, count], dim=1))
    return torch.cat(rows) if rows else torch.zeros(0, 4, dtype=torch.float64)


def moments(buckets: Sequence[Buckets]) -> Tensor:
    """Return norm, mean and standard deviation of r of every bucket with a norm above 0: [B, 3]."""
    table = bucket_table(buckets)
    norms, mean, spread, count = table[table[:, 0] > 0].unbind(1)
    return torch.stack([norms, mean, (spread / (count - 1).clamp_min(1)).sqrt()], dim=1)


def lengths(buckets: Sequence[Buckets]) -> set[int]:
    """Return the set of bucket sizes that occur, in coordinates."""
    counts = [bucket.exists.sum(1) for bucket in buckets]
    return set(torch.cat(counts).tolist()) if counts else set()
