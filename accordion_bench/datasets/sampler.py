"""Assign samples to workers in each step of an epoch, also in shards with different label distributions."""

import bisect
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accordion_bench.batches import UnequalSteps
from accordion_bench.comm.membership import SampleAssignment
from accordion_bench.options.checks import ValueRefused
from accordion_bench.tensors import keyed_rng


def log_proportions(prior: Tensor, alpha: float, workers: int, seed: int) -> Tensor:
    """Return log q_w up to a constant, [A, labels], float64; q_w itself may underflow. See `shards_by_label`.

    q = G / sum G of gamma variables, and G(a) = G(a + 1) U^(1 / a) with a uniform U. `prior` is p, [labels].
    """
    generator = keyed_rng.generator(seed, "label proportions")
    a = (alpha * prior.double()).expand(workers, -1)
    larger = torch._standard_gamma(a + 1, generator=generator)
    uniform = torch.rand(a.shape, generator=generator, dtype=torch.float64)
    # 1 - U is above 0; labels that do not occur have weight 0
    logarithms = larger.log() + torch.log1p(-uniform) / a
    return torch.where(a > 0, logarithms, -torch.inf)


def shards_by_label(labels: Tensor, sizes: Sequence[int], alpha: float, seed: int) -> list[Tensor]:
    """Assign every sample to one worker and return the sample indices of each (`dirichlet`).

        p   share of each label in the training set      q_w ~ Dir(alpha p), the label proportions of worker w

    Workers take turns in a keyed random order, each as many turns as its shard has samples. In each turn a label is
    drawn from q_w, and one sample with that label is assigned to worker w. When a label is used up, q_w is renormalised
    over the remaining labels.

    Source: Hsu, Qi, Brown 2019 (arXiv 1909.06335), whose clients also have equally many samples.

    Args:
        labels: labels of all samples, [n], integers from 0.
        sizes: number of samples of each worker; their sum is n.
        alpha: concentration, above 0; large = q_w is close to p, small = few labels per worker.
        seed: seed of the run.
    """
    order = torch.randperm(len(labels), generator=keyed_rng.generator(seed, "label order"))
    left = [order[labels[order] == label].tolist() for label in range(int(labels.max()) + 1)]
    counts = torch.tensor([len(own) for own in left])
    weights = log_proportions(counts / len(labels), alpha, len(sizes), seed)
    turns = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    turns = turns[torch.randperm(len(turns), generator=keyed_rng.generator(seed, "label turns"))]
    draws = torch.rand(len(turns), generator=keyed_rng.generator(seed, "label draws"), dtype=torch.float64)

    def ends() -> list[list[float]]:
        """Return the cumulative proportions of each worker, over labels that are not used up."""
        gone = torch.tensor([not samples for samples in left])
        return [list(itertools.accumulate(own)) for own in weights.masked_fill(gone, -torch.inf).softmax(1).tolist()]

    sums = ends()
    shards: list[list[int]] = [[] for _ in sizes]
    for worker, draw in zip(turns.tolist(), draws.tolist(), strict=True):
        label = bisect.bisect_right(sums[worker], draw * sums[worker][-1])
        label = min(label, bisect.bisect_left(sums[worker], sums[worker][-1]))  # rounding may exceed the last index
        shards[worker].append(left[label].pop())
        if not left[label] and any(left):
            sums = ends()
    return [torch.tensor(own, dtype=torch.int64) for own in shards]


def label_counts(labels: Tensor, shards: Sequence[Tensor]) -> list[list[int]]:
    """Return the number of samples of each label, per worker."""
    count = int(labels.max()) + 1
    return [torch.bincount(labels[own], minlength=count).tolist() for own in shards]


class Sharding(NamedTuple):
    """Rule that assigns the samples of an epoch to workers.

    Args:
        how: `reshuffled` in every epoch; `static`; `dirichlet`: each worker has a fixed shard with its own label
            distribution, reshuffled in every epoch; or `consecutive`: samples are segments of one sequence, cut into A
            x batch size strands of equal length, the last ones wrapped around to the start. Entry i of a worker's next
            batch continues entry i, and batches are always full.
        batches: samples per step of each worker, if they differ; () = equal batches.
        alpha: of `dirichlet`, the concentration; smaller = fewer labels per worker.
        labels: of `dirichlet`, labels of all loaded samples, [n].
    """

    how: str = "reshuffled"
    batches: tuple[int, ...] = ()
    alpha: float = 1.0
    labels: Tensor | None = None


class Sampler:
    """Shards a keyed permutation over the workers; the last, partial batch is kept.

    As in torch's DistributedSampler, worker w takes entries w, w + A, ..., and the permutation is extended with its own
    first entries so that all workers have equally many. If batch sizes differ, each step takes the next entries, one
    worker after the other, and every sample is used once, see `UnequalSteps`.

    Args:
        size: number of training samples.
        workers: A.
        seed: seed of the run.
        sharding: assignment rule.
        samples: indices of the training samples among all loaded ones; None = 0 to size - 1.
        device: device of the index tensors; an epoch's order is copied there once.
    """

    def __init__(
        self,
        size: int,
        workers: int,
        seed: int,
        sharding: Sharding = Sharding(),  # noqa: B008 -- immutable
        samples: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.size, self.workers, self.seed, self.sharding = size, workers, seed, sharding
        self.samples, self.device = samples, device
        self.consecutive = sharding.how == "consecutive"
        self.unequal = UnequalSteps(size, sharding.batches) if sharding.batches else None
        self.per_worker = -(-size // workers)
        self._batch_size = 1
        self.shards = self._by_label() if sharding.how == "dirichlet" else []
        self.deal: SampleAssignment | None = None
        self.steps_before = 0  # number of steps of the run before this epoch

    def enable_elastic_dealing(self, batch_size: int) -> None:
        """Distribute samples so that the number of workers may change during training, see `SampleAssignment`."""
        if self.consecutive or self.shards or self.unequal is not None:
            rule = "reshuffled or static where workers may join and leave (sync.elastic)"
            raise ValueRefused("dataset.sharding", rule, self.sharding.how, "reshuffled")
        self.deal = SampleAssignment(self.size, batch_size, self.seed, self.workers, self.sharding.how == "static")

    def _by_label(self) -> list[Tensor]:
        labels, each = self._labels(), divmod(self.size, self.workers)
        sizes = [each[0] + (worker < each[1]) for worker in range(self.workers)]
        if self.unequal is not None:
            sizes = list(self.unequal.of_epoch())
        return shards_by_label(labels, sizes, self.sharding.alpha, self.seed)

    def _labels(self) -> Tensor:
        assert self.sharding.labels is not None
        labels = self.sharding.labels.cpu()
        return labels if self.samples is None else labels[self.samples]

    def label_counts(self) -> list[list[int]]:
        """Return the number of samples of each label, per worker; [] unless workers have fixed shards."""
        return label_counts(self._labels(), self.shards) if self.shards else []

    def steps(self, batch_size: int) -> int:
        """Return the number of optimizer steps per epoch."""
        if self.unequal is None:
            return -(-self.per_worker // batch_size)
        return -(-self.size // sum(self.unequal.sizes)) if self.consecutive else self.unequal.steps

    def begin_epoch(self, epoch: int, batch_size: int) -> None:
        """Draw the order of samples in this epoch."""
        self._batch_size = batch_size
        if self.consecutive:
            self._strands = torch.arange(batch_size, device=self.device)
            return
        if self.shards:
            self._reshuffle(epoch)
            return
        keyed = 0 if self.sharding.how == "static" else epoch
        order = torch.randperm(self.size, generator=keyed_rng.generator(self.seed, "order", keyed))
        if self.samples is not None:
            order = self.samples[order]
        if self.unequal is not None:
            self._order = order.to(self.device)
            return
        total = self.per_worker * self.workers
        order = order.repeat(-(-total // self.size))[:total]
        self._shards = order.to(self.device).view(self.per_worker, self.workers).T

    def _reshuffle(self, epoch: int) -> None:
        """Draw the order of each worker's own shard; with equal batches, shorter ones repeat their first entries."""
        orders = []
        for worker, shard in enumerate(self.shards):
            generator = keyed_rng.generator(self.seed, "shard order", epoch, worker)
            order = shard[torch.randperm(len(shard), generator=generator)]
            orders.append(order if self.samples is None else self.samples[order])
        if self.unequal is None:
            filled = [order.repeat(2)[: self.per_worker] for order in orders]
            self._shards = torch.stack(filled).to(self.device)
        else:
            self._own = [order.to(self.device) for order in orders]

    def batch(self, worker: int, step: int) -> Tensor:
        """Return the indices of one worker's samples in one step of the epoch."""
        if self.deal is not None:
            own = self.deal.samples(worker, self.steps_before + step)
            return (own if self.samples is None else self.samples[own]).to(self.device)
        if self.consecutive:
            sizes = self.sharding.batches or (self._batch_size,) * self.workers
            strands = sum(sizes[:worker]) + self._strands[: sizes[worker]]
            return (strands * self.steps(self._batch_size) + step) % self.size
        if self.unequal is not None:
            sizes = self.unequal.of(step)
            if self.shards:
                first = step * self.unequal.sizes[worker]
                return self._own[worker][first : first + sizes[worker]]
            first = self.unequal.before(step) + sum(sizes[:worker])
            return self._order[first : first + sizes[worker]]
        return self._shards[worker, step * self._batch_size : (step + 1) * self._batch_size]

    def sizes(self, step: int) -> tuple[int, ...]:
        """Return the number of samples per worker in a step of the epoch, if batches differ; () = equal batches."""
        if self.unequal is None:
            return ()
        return self.unequal.sizes if self.consecutive else self.unequal.of(step)

    def seen(self, step: int) -> int:
        """Return the number of samples of all workers in the epoch's steps before `step`."""
        if self.unequal is not None:
            return self.unequal.before(step)
        return min(step * self._batch_size, self.per_worker) * self.workers
