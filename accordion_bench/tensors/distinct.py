"""Sampling of distinct random integers, uniform over all sets."""

import numpy as np
import torch
from torch import Tensor

FEW = (
    128  # so many times as many numbers as are drawn, from which on sorting the drawn ones costs less than marking all
)


def draw_distinct(n: int, k: int, generator: torch.Generator) -> Tensor:
    """Return k ascending integers below n, uniform over all sets of k.

    The result is the first k distinct values of a stream of independent draws. Each round draws at most the missing
    number of values, so that no value is discarded. For k > n/2 the n - k others are drawn, which needs few rounds.
    """
    wanted = min(k, n - k)

    def draw(missing: int) -> Tensor:
        return torch.empty(missing, dtype=torch.int64).random_(generator=generator) % n  # of 63 bits: bias n / 2^63

    if FEW * k < n:  # no work is proportional to n
        found = torch.empty(0, dtype=torch.int64)
        while len(found) < k:
            found = torch.cat([found, draw(k - len(found))]).sort().values.unique_consecutive()
        return found
    hit = np.zeros(n, bool)
    count = 0
    while count < wanted:
        hit[draw(wanted - count).numpy()] = True
        count = int(np.count_nonzero(hit))
    return torch.from_numpy(np.flatnonzero(hit if wanted == k else ~hit))
