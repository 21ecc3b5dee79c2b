"""Statistics of a quantiser's buckets, collected in the few steps before a codebook is fitted.

    BucketMoments(count)         norm, mean, standard deviation of r in the buckets of largest norm  12 count bytes sent
    PooledMoments()              sum of r, of (n_b - 1) sigma_b^2, of n_b, over all buckets          24 bytes
    CoordinateHistogram(weight)  of |r|, buckets weighted by their norm                              98,304 bytes

r = v / norm are the coordinates of a bucket, which lie in [-1, 1]; buckets of norm 0 are left out.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from accordion_bench.adaptive.distributions import POWER
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.buckets import Buckets, bucket_table, moments
from accordion_bench.requests import BucketMoments, BucketStatistic, CoordinateHistogram, PooledMoments, Request


class BucketStatistics:
    """Sums over steps; one collective when read.

    Args:
        comm: collectives; everything that is sent is charged to control_bytes.

    Attributes:
        sums: what was collected, one row per local worker.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.sums: dict[BucketStatistic, Tensor] = {}

    @torch.no_grad()
    def add(self, needs: frozenset[BucketStatistic], buckets_W: Sequence[Sequence[Buckets]]) -> None:
        """Add one step's buckets: for each local worker, those of all tensors."""
        for statistic in in_order(needs):
            new = torch.stack([_summary(statistic, buckets) for buckets in buckets_W])
            if statistic not in self.sums:
                self.sums[statistic] = new
            elif isinstance(statistic, BucketMoments):
                both = torch.cat([self.sums[statistic], new], dim=1)
                self.sums[statistic] = torch.stack([_largest(rows, min(statistic.count, len(rows))) for rows in both])
            else:
                self.sums[statistic] += new

    @torch.no_grad()
    def read(self, needs: frozenset[Request]) -> dict[BucketStatistic, Tensor]:
        """The statistics of all workers, the same on all; what was collected is forgotten."""
        out = {}
        for statistic in in_order(needs & self.sums.keys()):
            own_W = self.sums.pop(statistic).to(self.comm.device)
            if not own_W.numel():
                continue
            if not isinstance(statistic, BucketMoments):
                out[statistic] = self.comm.sum_(own_W.sum(0), "control")
                continue
            message_W = own_W.float().flatten(1).contiguous().view(torch.uint8)
            rows_A = self.comm.all_gather(message_W, "control").contiguous().view(torch.float32)
            rows_A = rows_A.view(-1, 3).double()
            out[statistic] = _largest(rows_A, min(statistic.count, len(rows_A)))
        return out


def in_order(requests: Iterable[Request]) -> list[BucketStatistic]:
    """The bucket statistics among them, in an order that is the same on all workers."""
    return sorted((r for r in requests if isinstance(r, BucketStatistic)), key=lambda statistic: statistic.name)


def _summary(statistic: BucketStatistic, buckets: Sequence[Buckets]) -> Tensor:
    if isinstance(statistic, CoordinateHistogram):
        from accordion_bench.adaptive.distributions import Histogram

        arrays = [torch.zeros(3, 4096, dtype=torch.float64)]
        for norms, r, exists in buckets:
            weight = norms.double()[:, None] ** POWER[statistic.weight] * exists * (norms > 0)[:, None]
            arrays.append(Histogram.of(r, weight).arrays())
        return torch.stack([array.to(arrays[-1].device) for array in arrays]).sum(0)
    if isinstance(statistic, PooledMoments):
        norms, mean, spread, count = bucket_table(buckets).unbind(1)
        return torch.stack([(mean * count).sum(), spread.sum(), count.sum()])
    if isinstance(statistic, BucketMoments):  # as many rows on every worker, whatever is zero there
        return _largest(moments(buckets), min(statistic.count, sum(len(b.norms) for b in buckets)))
    raise TypeError(f"no statistic of buckets: {statistic}")


def _largest(rows: Tensor, count: int) -> Tensor:
    """The `count` rows [B, 3] of largest norm; rows of zeros where there are fewer."""
    order = rows[:, 0].argsort(descending=True, stable=True)[:count]
    return torch.nn.functional.pad(rows[order], (0, 0, 0, count - len(order)))
