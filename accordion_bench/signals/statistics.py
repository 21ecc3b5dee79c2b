"""Statistics for policies, collected only if one needs them: sums and norms of gradients, and moments of buckets."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.adaptive.distributions import Histogram, weight_of
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.on_device import copy_on_cpu
from accordion_bench.compressors.probe import Buckets, bucket_table, lengths
from accordion_bench.compressors.uncoded import Dense
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.plan import (
    WHOLE_MODEL,
    BucketMoments,
    BucketStatistic,
    CoordinateHistogram,
    PooledMoments,
    Request,
    SquareNorms,
    TensorSpec,
)
from accordion_bench.tensors.same_shape import Blocks

SQUARES = "squared norms"  # cannot collide with parameter names, which contain no space
LEADERS = frozenset(["norm_of_sum_local", "msdr_local"])


class GradientSums:
    """Sums over one epoch, per tensor, of local gradients, their mean over workers, or the decoded updates.

    `norm_of_sum_local` reads only worker 0 (other processes collect nothing). `norm_of_sum_mean` costs one dense
    all-reduce when read, charged to control_bytes. `norm_of_sum_update` needs no communication.

    `msdr_local`, of worker 0 only: MSDR = ||m|| / sqrt(sum_i v_i), with m_i and v_i mean and variance of coordinate i
    over the T steps. As sum_i v_i = (1/T) sum_t ||g_t||^2 - ||m||^2, it stores one sum of gradients, and two numbers
    per tensor. Infinite if nothing varies; NaN for a zero gradient.

    Args:
        specs, comm: the tensors whose norms are needed, one float each; collectives.
        like: defines dtype and device; half precision is summed in float32.
    """

    def __init__(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> None:
        self.specs, self.comm = specs, comm
        self.like = like.float() if like.element_size() == 2 else like
        self.sums: dict[str, Blocks] = {}
        self.squares: Tensor | None = None  # of msdr_local: per tensor sum_t ||g_t||^2, then T

    def begin(self, needs: frozenset[str]) -> None:
        """Start an epoch: clear the sums of the last one, and allocate those that are needed."""
        if not self.comm.leader:
            needs = needs - LEADERS
        self.squares = None
        if "msdr_local" in needs:
            self.squares = torch.zeros(len(self.specs) + 1, dtype=torch.float64, device=self.like.device)
        self.sums = {name: Blocks(self.specs, 1, self.like) for name in sorted(needs)}

    @torch.no_grad()
    def add_gradients(self, gradients_W: Sequence[Tensor]) -> None:
        """Add one step's gradients [W, ...], before residual, compression and reduction."""
        for name in self.sums:
            self.comm.clock.event(name)
        if LEADERS & self.sums.keys():
            firsts = list(gradients_W) if self.comm.local_workers == 1 else [g_W[:1] for g_W in gradients_W]
            for name in LEADERS & self.sums.keys():
                torch._foreach_add_(self.sums[name].tensors, firsts)
            if self.squares is not None:
                norms = torch.stack(torch._foreach_norm(firsts, 2, dtype=torch.float64))
                self.squares[:-1] += norms.square()
                self.squares[-1] += 1
        if "norm_of_sum_mean" in self.sums:
            sums = [self.comm.weighted(g_W).sum(0, keepdim=True) for g_W in gradients_W]
            torch._foreach_add_(self.sums["norm_of_sum_mean"].tensors, sums)

    @torch.no_grad()
    def add_updates(self, updates: Sequence[Tensor], specs: Sequence[TensorSpec] | None = None) -> None:
        """Add one step's decoded updates [...], of all tensors or of the given ones."""
        if "norm_of_sum_update" in self.sums:
            named = zip(self.specs, self.sums["norm_of_sum_update"].tensors, strict=True)
            sums = {spec.name: total for spec, total in named}
            torch._foreach_add_([sums[spec.name] for spec in specs or self.specs], [update[None] for update in updates])

    def forget_updates(self) -> None:
        """Clear the sum of the decoded updates."""
        if "norm_of_sum_update" in self.sums:
            self.sums["norm_of_sum_update"] = Blocks(self.specs, 1, self.like)

    @torch.no_grad()
    def read(self) -> dict[str, dict[str, float]]:
        """Return per signal the value of each tensor by name, and of the whole `model`; valid on the leader only."""
        values = {}
        names = [*(spec.name for spec in self.specs), WHOLE_MODEL]
        for signal, total in self.sums.items():
            if signal == "norm_of_sum_mean":
                for block in total.blocks:
                    self.comm.sum_(block, "control").div_(self.comm.workers)
            norms = torch.stack([t.double().norm() for t in total.tensors])
            norms = torch.cat([norms, norms.norm()[None]])
            if signal == "msdr_local" and self.squares is not None:
                squares, steps = self.squares[:-1] / self.squares[-1], self.squares[-1]
                means = norms / steps
                # rounding errors may make the difference slightly negative
                spread = (torch.cat([squares, squares.sum()[None]]) - means.square()).clamp_min(0)
                norms = means / spread.sqrt()
            values[signal] = dict(zip(names, norms.tolist(), strict=True))
        return values

    def state_dict(self) -> dict[str, Any]:
        """Return the running sums, keyed by signal and parameter name."""
        sums = {
            name: {spec.name: copy_on_cpu(t) for spec, t in zip(self.specs, total.tensors, strict=True)}
            for name, total in self.sums.items()
        }
        if self.squares is not None:
            sums["msdr_local"][SQUARES] = copy_on_cpu(self.squares)
        return sums

    def add_state(self, state: dict[str, Any]) -> None:
        """Add the sums of a `state_dict()` to the current ones."""
        for name in self.sums.keys() & state.keys():
            for spec, t in zip(self.specs, self.sums[name].tensors, strict=True):
                t += state[name][spec.name].to(t.device)
        if self.squares is not None and "msdr_local" in state:
            self.squares += state["msdr_local"][SQUARES].to(self.squares.device)


@torch.no_grad()
def square_norms(
    exchange: Exchange, gradients_W: Sequence[Tensor], updates: Sequence[Tensor], batch_size: int
) -> SquareNorms:
    """Return the mean over workers of |g_w|^2, and |mean_w g_w|^2; every process must call it, after the exchange.

    A dense exchange provides the mean. After any other exchange, one more dense all-reduce is charged to control_bytes.
    The squares themselves are 8 bytes.

    Args:
        exchange, gradients_W, updates: of all workers; its inputs [W, ...] and results [...].
        batch_size: samples per g_w.
    """
    comm = exchange.comm
    small = _square(gradients_W)
    if type(exchange.compressor) is Dense:
        mean = list(updates)
    else:
        total = torch.cat([g_W.sum(0).flatten() for g_W in gradients_W])
        mean = [comm.sum_(total, "control").div_(comm.workers)]
    of_workers, of_mean = torch.stack([comm.sum_(small, "control"), _square(mean)]).tolist()
    return SquareNorms(of_workers / comm.workers, of_mean, batch_size)


def _square(xs: Sequence[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in xs]
    return torch.stack(norms).square().sum()


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
