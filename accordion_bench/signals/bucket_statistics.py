"""Statistics of a quantiser's buckets, collected in the few steps before a codebook is fitted.

    bucket_moments:K        norm, mean and standard deviation of r in the K buckets of largest norm   12 K bytes sent
    pooled_moments          sum of r, of (n_b - 1) sigma_b^2, of n_b, over all buckets                24 bytes sent
    histogram:WEIGHT        of |r|, buckets weighted by their norm `squared`, `first` or `none`       98,304 bytes sent

r = v / norm are the coordinates of a bucket, which lie in [-1, 1]; buckets of norm 0 are left out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.adaptive.distributions import POWER
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.buckets import Buckets, bucket_table, moments


class BucketStatistics:
    """Sums over steps; one collective when read.

    Args:
        comm: collectives; everything that is sent is charged to control_bytes.

    Attributes:
        sums: what was collected by name, one row per local worker.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, needs: frozenset[str], buckets_W: Sequence[Sequence[Buckets]]) -> None:
        """Add one step's buckets: for each local worker, those of all tensors."""
        for name in sorted(needs):
            kind, _, argument = name.partition(":")
            new = torch.stack([_summary(kind, argument, buckets) for buckets in buckets_W])
            if name not in self.sums:
                self.sums[name] = new
            elif kind == "bucket_moments":
                both = torch.cat([self.sums[name], new], dim=1)
                self.sums[name] = torch.stack([_largest(rows, min(int(argument), len(rows))) for rows in both])
            else:
                self.sums[name] += new

    @torch.no_grad()
    def read(self, needs: frozenset[str]) -> dict[str, Tensor]:
        """The statistics of all workers, the same on all; what was collected is forgotten."""
        out = {}
        for name in sorted(needs & self.sums.keys()):
            own_W = self.sums.pop(name).to(self.comm.device)
            if not own_W.numel():
                continue
            if not name.startswith("bucket_moments"):
                out[name] = self.comm.sum_(own_W.sum(0), "control")
                continue
            message_W = own_W.float().flatten(1).contiguous().view(torch.uint8)
            rows_A = self.comm.all_gather(message_W, "control").contiguous().view(torch.float32)
            rows_A = rows_A.view(-1, 3).double()
            out[name] = _largest(rows_A, min(int(name.partition(":")[2]), len(rows_A)))
        return out


def _summary(kind: str, argument: str, buckets: Sequence[Buckets]) -> Tensor:
    if kind == "histogram":
        from accordion_bench.adaptive.distributions import Histogram

        arrays = [torch.zeros(3, 4096, dtype=torch.float64)]
        for norms, r, exists in buckets:
            weight = norms.double()[:, None] ** POWER[argument] * exists * (norms > 0)[:, None]
            arrays.append(Histogram.of(r, weight).arrays())
        return torch.stack([array.to(arrays[-1].device) for array in arrays]).sum(0)
    if kind == "pooled_moments":
        norms, mean, spread, count = bucket_table(buckets).unbind(1)
        return torch.stack([(mean * count).sum(), spread.sum(), count.sum()])
    # as many rows on every worker, whatever is zero there
    return _largest(moments(buckets), min(int(argument), sum(len(b.norms) for b in buckets)))


def _largest(rows: Tensor, count: int) -> Tensor:
    """The `count` rows [B, 3] of largest norm; rows of zeros where there are fewer."""
    order = rows[:, 0].argsort(descending=True, stable=True)[:count]
    return torch.nn.functional.pad(rows[order], (0, 0, 0, count - len(order)))
