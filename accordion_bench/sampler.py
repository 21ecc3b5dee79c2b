"""Sampler: which worker sees which training images in which step; a function of (seed, epoch, step, worker) alone."""

import torch
from torch import Tensor

from accordion_bench import rng


class Sampler:
    """Shards a keyed permutation over the workers; the last, partial batch is kept.

    As in torch's DistributedSampler, worker w takes entries w, w + A, ... and the permutation is filled up from its own
    beginning, so that all workers have equally many.

    Args:
        size: training samples.
        workers: A.
        seed: of the run.
        sharding: `reshuffled` in every epoch or `static`.
    """

    def __init__(self, size: int, workers: int, seed: int, sharding: str = "reshuffled") -> None:
        self.size, self.workers, self.seed, self.sharding = size, workers, seed, sharding
        self.per_worker = -(-size // workers)

    def steps(self, batch_size: int) -> int:
        """Optimizer steps per epoch."""
        return -(-self.per_worker // batch_size)

    def begin_epoch(self, epoch: int, batch_size: int) -> None:
        """Draw the order of this epoch."""
        keyed = 0 if self.sharding == "static" else epoch
        order = torch.randperm(self.size, generator=rng.generator(self.seed, "order", keyed))
        total = self.per_worker * self.workers
        order = order.repeat(-(-total // self.size))[:total]
        self._shards = order.view(self.per_worker, self.workers).T
        self._batch_size = batch_size

    def batch(self, worker: int, step: int) -> Tensor:
        """Indices of one worker's samples in one step of the epoch."""
        return self._shards[worker, step * self._batch_size : (step + 1) * self._batch_size]
