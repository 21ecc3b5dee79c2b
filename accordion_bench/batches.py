"""Samples of each worker in each step of an epoch, where workers have batches of their own: batch_size=[64,32,32,32].

    n_w   samples of worker w in a step      A   workers      mean = sum_w n_w g_w / sum_w n_w

Means over workers are weighted: worker w's tensors are multiplied by A n_w / sum n before anything is done with them.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

BatchSize = int | Sequence[int]
"""Samples per worker and step: a number, or one for each worker."""


def unequal(batch_size: BatchSize) -> tuple[int, ...]:
    """The batch of each worker where they differ; () where all workers have the same."""
    return () if isinstance(batch_size, int) or len(set(batch_size)) == 1 else tuple(batch_size)


def largest(batch_size: BatchSize) -> int:
    """Samples per step of the worker that has most."""
    return batch_size if isinstance(batch_size, int) else max(batch_size)


def weights(samples: Sequence[int]) -> list[float]:
    """A n_w / sum n of each worker: 1 where all have as many samples, and 1 on average.

    Example:
        >>> weights([64, 32, 32, 32])
        [1.6, 0.8, 0.8, 0.8]
    """
    total = sum(samples)
    return [len(samples) * n / total for n in samples]


@dataclass(frozen=True)
class UnequalSteps:
    """The steps of an epoch in which every sample is seen once.

    The last, partial step is shared out by the sizes of the batches, at least one sample for each worker. Where fewer
    samples are left than there are workers, the step before has them in addition, at most one more for each worker.

    Args:
        samples: of an epoch; at least those of one step.
        sizes: samples of each worker in a whole step.

    Example:
        >>> [UnequalSteps(100, (30, 10, 10)).of(step) for step in range(2)]
        [(30, 10, 10), (30, 10, 10)]
    """

    samples: int
    sizes: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        whole, left = divmod(self.samples, sum(self.sizes))
        return whole + (left >= len(self.sizes))

    def of(self, step: int) -> tuple[int, ...]:
        """Samples of each worker in a step."""
        whole, left = divmod(self.samples, sum(self.sizes))
        if step == whole:
            return self._shared(left)
        if step == whole - 1 and left < len(self.sizes):
            return tuple(n + (worker < left) for worker, n in enumerate(self.sizes))
        return self.sizes

    def _shared(self, left: int) -> tuple[int, ...]:
        """A partial step's samples: one for each worker, and of the rest a share by its size less one."""
        rest, more = left - len(self.sizes), [n - 1 for n in self.sizes]
        total = sum(more)
        ends = [0, *((2 * rest * until + total) // (2 * total) for until in itertools.accumulate(more))]
        return tuple(1 + after - before for before, after in itertools.pairwise(ends))

    def of_epoch(self) -> tuple[int, ...]:
        """Samples of each worker in an epoch."""
        last = [self.of(step) for step in range(max(0, self.steps - 2), self.steps)]
        whole = self.steps - len(last)
        return tuple(whole * n + sum(own) for n, *own in zip(self.sizes, *last, strict=True))

    def before(self, step: int) -> int:
        """Samples of all workers in the steps before one."""
        return self.samples if step >= self.steps else step * sum(self.sizes)

    def kinds(self) -> set[int]:
        """How many samples a worker has in any step."""
        return {n for step in {0, self.steps - 2, self.steps - 1} if step >= 0 for n in self.of(step)}
