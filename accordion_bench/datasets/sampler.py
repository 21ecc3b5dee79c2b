"""Sampler: which worker sees which training samples in which step; a function of (seed, epoch, step, worker) alone."""

import torch
from torch import Tensor

from accordion_bench.tensors import keyed_rng


class Sampler:
    """Shards a keyed permutation over the workers; the last, partial batch is kept.

    As in torch's DistributedSampler, worker w takes entries w, w + A, ... and the permutation is filled up from its own
    beginning, so that all workers have equally many.

    Args:
        size: training samples.
        workers: A.
        seed: of the run.
        sharding: `reshuffled` in every epoch, `static`, or `consecutive`: samples are segments of one sequence, cut
            into A x batch size strands of equal length, the last ones filled up from its beginning; entry i of a
            worker's next batch continues entry i. Batches are always whole.
        samples: numbers of the training samples among all that are loaded; None = 0 to size - 1.
        device: where batches are wanted; an epoch's order goes there once.
    """

    def __init__(
        self,
        size: int,
        workers: int,
        seed: int,
        sharding: str = "reshuffled",
        samples: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.size, self.workers, self.seed, self.sharding = size, workers, seed, sharding
        self.samples, self.device = samples, device
        self.per_worker = -(-size // workers)

    def steps(self, batch_size: int) -> int:
        """Optimizer steps per epoch."""
        return -(-self.per_worker // batch_size)

    def begin_epoch(self, epoch: int, batch_size: int) -> None:
        """Draw the order of this epoch."""
        self._batch_size = batch_size
        if self.sharding == "consecutive":
            self._strands = torch.arange(batch_size, device=self.device)
            return
        keyed = 0 if self.sharding == "static" else epoch
        order = torch.randperm(self.size, generator=keyed_rng.generator(self.seed, "order", keyed))
        if self.samples is not None:
            order = self.samples[order]
        total = self.per_worker * self.workers
        order = order.repeat(-(-total // self.size))[:total]
        self._shards = order.to(self.device).view(self.per_worker, self.workers).T

    def batch(self, worker: int, step: int) -> Tensor:
        """Indices of one worker's samples in one step of the epoch."""
        if self.sharding == "consecutive":
            strands = worker * self._batch_size + self._strands
            return (strands * self.steps(self._batch_size) + step) % self.size
        return self._shards[worker, step * self._batch_size : (step + 1) * self._batch_size]
