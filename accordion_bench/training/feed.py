"""Provide the batch of each local worker in a step."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.graphs import WORKERS
from accordion_bench.datasets.sampler import Sampler
from accordion_bench.training.replayed import Replayed, Slots


class Own(NamedTuple):
    """Batch of one local worker.

    Args:
        samples: number of samples.
        read: function that returns inputs (images in their memory format) and targets.
        key: equal for batches of the same shapes in the same memory.
    """

    samples: int
    read: Callable[[], tuple[Tensor, Tensor]]
    key: Hashable


class Feed:
    """Batches of an epoch, step by step.

    If the workers' passes are captured and the data is on the device, reading the batch is part of the captured work.
    Then only the sample indices of all workers are copied in each step, in one copy.

    Args:
        data: loaded data set.
        sampler: assigns samples to workers.
        comm: communicator with the local workers.
        replayed: executes the passes.
        memory_format: memory format of images.
    """

    def __init__(
        self, data: Any, sampler: Sampler, comm: Comm, replayed: Replayed, memory_format: torch.memory_format
    ) -> None:
        self.data, self.sampler, self.comm, self.memory_format = data, sampler, comm, memory_format
        self.slots = Slots(replayed, memory_format)
        self.in_passes = replayed.captures(WORKERS) and getattr(data, "by_device", False)
        self._numbers: dict[tuple[int, ...], Tensor] = {}  # sample indices [sum of sizes], by batch sizes
        self._steps: Iterator[Sequence[Tensor]] = iter(())
        self._batches: Iterator[tuple[Tensor, Tensor]] = iter(())

    def begin_epoch(self, epoch: int, steps: range) -> None:
        """Set the steps of the epoch that follow, in the order that the sampler has drawn."""
        sampler = self.sampler  # a generator that refers to self would be a reference cycle
        workers = range(self.comm.first_worker, self.comm.first_worker + self.comm.local_workers)
        numbers = ([sampler.batch(worker, step) for worker in workers] for step in steps)
        if self.in_passes:
            self.data.begin_epoch(epoch)
            self._steps = numbers
        else:
            self._batches = self.data.train_batches(epoch, (own for step in numbers for own in step))

    def step(self) -> Iterator[Own]:
        """Yield the batch of each local worker in the next step; mark each worker's turn on the clock."""
        if not self.in_passes:
            for row in range(self.comm.local_workers):
                self.comm.clock.worker()
                x, y = self.slots.filled(WORKERS, row, *next(self._batches))
                key = (x.data_ptr(), y.data_ptr(), x.shape, y.shape)
                yield Own(len(y), lambda x=x, y=y: (x, y), key)  # type: ignore[misc]
            return
        numbers = next(self._steps)
        sizes = tuple(len(own) for own in numbers)
        place = self._numbers.get(sizes)
        if place is None:
            place = self._numbers[sizes] = torch.empty_like(torch.cat(list(numbers)))
        torch.cat(list(numbers), out=place)
        for own in place.split(list(sizes)):
            self.comm.clock.worker()
            yield Own(len(own), lambda own=own: self._read(own), own.data_ptr())  # type: ignore[misc]

    def _read(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.data.train_batch(numbers)
        return x.to(memory_format=self.memory_format), y
