"""Samples per worker in each step of an epoch if batch sizes differ between workers: batch_size=[64,32,32,32].

    n_w   samples of worker w in a step      A   workers      mean = sum_w n_w g_w / sum_w n_w

Means over workers are weighted: worker w's tensors are multiplied by A n_w / sum n before any other operation.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

BatchSize = int | Sequence[int]
"""Samples per worker and step: one number, or one per worker."""


def unequal(batch_size: BatchSize) -> tuple[int, ...]:
    """Return the batch size of each worker if they differ; () if they are equal."""
    return () if isinstance(batch_size, int) or len(set(batch_size)) == 1 else tuple(batch_size)


def largest(batch_size: BatchSize) -> int:
    """Return the largest number of samples per worker and step."""
    return batch_size if isinstance(batch_size, int) else max(batch_size)


def weights(samples: Sequence[int]) -> list[float]:
    """Return A n_w / sum n for each worker: 1 if batches are equal, and 1 on average.

    Example:
        >>> weights([64, 32, 32, 32])
        [1.6, 0.8, 0.8, 0.8]
    """
    total = sum(samples)
    return [len(samples) * n / total for n in samples]


@dataclass(frozen=True)
class UnequalSteps:
    """Steps of an epoch in which every sample is used once, for unequal batches.

    The last, partial step is divided in proportion to the batch sizes, with at least one sample per worker. If fewer
    samples than workers remain, the previous step includes them, at most one more per worker.

    Args:
        samples: number of samples of an epoch, at least one full step.
        sizes: samples of each worker in a full step.

    Example:
        >>> [UnequalSteps(100, (30, 10, 10)).of(step) for step in range(2)]
        [(30, 10, 10), (30, 10, 10)]
    """

    samples: int
    sizes: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Number of steps of an epoch."""
        whole, left = divmod(self.samples, sum(self.sizes))
        return whole + (left >= len(self.sizes))

    def of(self, step: int) -> tuple[int, ...]:
        """Return the samples of each worker in a step."""
        whole, left = divmod(self.samples, sum(self.sizes))
        if step == whole:
            return self._shared(left)
        if step == whole - 1 and left < len(self.sizes):
            return tuple(n + (worker < left) for worker, n in enumerate(self.sizes))
        return self.sizes

    def _shared(self, left: int) -> tuple[int, ...]:
        """Divide a partial step: one sample per worker, the rest in proportion to (size - 1)."""
        rest, more = left - len(self.sizes), [n - 1 for n in self.sizes]
        total = sum(more)
        ends = [0, *((2 * rest * until + total) // (2 * total) for until in itertools.accumulate(more))]
        return tuple(1 + after - before for before, after in itertools.pairwise(ends))

    def of_epoch(self) -> tuple[int, ...]:
        """Return the samples of each worker in an epoch."""
        last = [self.of(step) for step in range(max(0, self.steps - 2), self.steps)]
        whole = self.steps - len(last)
        return tuple(whole * n + sum(own) for n, *own in zip(self.sizes, *last, strict=True))

    def before(self, step: int) -> int:
        """Return the samples of all workers in the steps before `step`."""
        return self.samples if step >= self.steps else step * sum(self.sizes)

    def kinds(self) -> set[int]:
        """Return all numbers of samples that a worker may have in a step."""
        return {n for step in {0, self.steps - 2, self.steps - 1} if step >= 0 for n in self.of(step)}
