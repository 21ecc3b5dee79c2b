"""Statistics of a quantiser's buckets, collected in the few steps before a codebook is fitted.

    BucketMoments(count, weight)  mean, standard deviation and weight of r in some buckets   40 bytes sent for each
    PooledMoments()               sum of r, of (d_b - 1) sigma_b^2, of d_b, over all buckets  24 bytes
    CoordinateHistogram(weight)   of |r|, coordinates weighted by the norms of their buckets  98,304 bytes

r = v / norm are the d_b coordinates of a bucket, in [-1, 1]; buckets of norm 0 are excluded.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from accordion_bench.adaptive.distributions import Histogram, weight_of
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.probe import Buckets, bucket_table, lengths
from accordion_bench.requests import BucketMoments, BucketStatistic, CoordinateHistogram, PooledMoments, Request

# columns of BucketMoments during collection; OTHERS is the weight of the excluded buckets that a row represents
NORM, MEAN, SIGMA, LENGTH, OTHERS = range(5)


class BucketStatistics:
    """Sums over steps; reading them takes one collective.

    Args:
        comm: collectives; all traffic is charged to control_bytes.

    Attributes:
        sums: the collected statistics, one row per local worker, on the CPU.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.sums: dict[BucketStatistic, Tensor] = {}

    @torch.no_grad()
    def add(self, needs: frozenset[BucketStatistic], buckets_W: Sequence[Sequence[Buckets]]) -> None:
        """Add one step's buckets: for each local worker, those of all tensors."""
        kinds = "equal" if len(lengths(buckets_W[0])) <= 1 else "differ"
        wanted = [statistic for statistic in in_order(needs) if statistic.lengths in ("any", kinds)]
        tables_W = torch.zeros(0)
        if not all(isinstance(statistic, CoordinateHistogram) for statistic in wanted):
            tables_W = torch.stack([bucket_table(buckets) for buckets in buckets_W]).cpu()  # one copy to the host
        for statistic in wanted:
            if isinstance(statistic, CoordinateHistogram):
                new = torch.stack([_histogram(statistic, buckets) for buckets in buckets_W]).cpu()
            else:
                new = torch.stack([_summary(statistic, table) for table in tables_W])
            if statistic not in self.sums:
                self.sums[statistic] = new
            elif isinstance(statistic, BucketMoments):
                both = torch.cat([self.sums[statistic], new], dim=1)
                self.sums[statistic] = torch.stack([_largest(rows, statistic) for rows in both])
            else:
                self.sums[statistic] += new

    @torch.no_grad()
    def read(self, needs: frozenset[Request]) -> dict[BucketStatistic, Tensor]:
        """Return the statistics of all workers, the same on all, on the CPU, and clear what was collected."""
        out = {}
        for statistic in in_order(needs & self.sums.keys()):
            own_W = self.sums.pop(statistic).to(self.comm.device)
            if not own_W.numel():
                continue
            if not isinstance(statistic, BucketMoments):
                out[statistic] = self.comm.sum_(own_W.sum(0), "control").cpu()
                continue
            message_W = own_W.flatten(1).contiguous().view(torch.uint8)
            rows_A = self.comm.all_gather(message_W, "control").cpu().contiguous().view(torch.float64)
            out[statistic] = _components(_largest(rows_A.view(-1, 5), statistic), statistic)
        return out


def in_order(requests: Iterable[Request]) -> list[BucketStatistic]:
    """Return the bucket statistics among the requests, in the same order on all workers."""
    return sorted((r for r in requests if isinstance(r, BucketStatistic)), key=lambda statistic: statistic.name)


def _histogram(statistic: CoordinateHistogram, buckets: Sequence[Buckets]) -> Tensor:
    device = buckets[0].norms.device if buckets else None
    arrays = [torch.zeros(3, 4096, dtype=torch.float64, device=device)]
    for norms, r, exists in buckets:
        weight = weight_of(norms, statistic.weight)[:, None] * exists
        arrays.append(Histogram.of(r, weight).arrays())
    return torch.stack(arrays).sum(0)


def _summary(statistic: BucketStatistic, table: Tensor) -> Tensor:
    """Return the statistic of one worker's buckets, given the result of `bucket_table`."""
    norms, mean, spread, count = table.unbind(1)
    if isinstance(statistic, PooledMoments):
        return torch.stack([(mean * count).sum(), spread.sum(), (count * (norms > 0)).sum()])
    if isinstance(statistic, BucketMoments):
        sigma = (spread / (count - 1).clamp_min(1)).sqrt()
        return _largest(torch.stack([norms, mean, sigma, count, torch.zeros_like(norms)], dim=1), statistic)
    raise TypeError(f"no statistic of buckets: {statistic}")


def _largest(rows: Tensor, statistic: BucketMoments) -> Tensor:
    """Return, for each length, the rows [B, 5] of largest norm; the first one represents the excluded rows."""
    kept = []
    for length in rows[:, LENGTH].unique():
        same = rows[rows[:, LENGTH] == length]
        same = same[same[:, NORM].argsort(descending=True, stable=True)]
        left_out = same[statistic.count :]
        same = same[: statistic.count].clone()
        same[0, OTHERS] += (_own_weight(left_out, statistic) + left_out[:, OTHERS]).sum()
        kept.append(same)
    return torch.cat(kept) if kept else rows


def _components(rows: Tensor, statistic: BucketMoments) -> Tensor:
    """Return mean, standard deviation and weight [B, 3]; the weights of a length sum to that of all its buckets."""
    weights = _own_weight(rows, statistic)
    for length in rows[:, LENGTH].unique():
        same = rows[:, LENGTH] == length
        own = weights[same].sum()
        weights[same] *= (own + rows[same, OTHERS].sum()) / own if own > 0 else 1
    return torch.stack([rows[:, MEAN], rows[:, SIGMA], weights], dim=1)


def _own_weight(rows: Tensor, statistic: BucketMoments) -> Tensor:
    """Return d_b n_b^2, the weight of a bucket in the quantiser's error, or the same with another power of the norm."""
    return rows[:, LENGTH] * weight_of(rows[:, NORM], statistic.weight)
