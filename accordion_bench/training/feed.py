"""Feed: which batch each local worker computes with in a step, and where it comes from."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.graphs import WORKERS
from accordion_bench.datasets.sampler import Sampler
from accordion_bench.training.replayed import Replayed, Slots


class Own(NamedTuple):
    """The batch of one local worker.

    samples: in it.
    read: gives inputs, images in their memory format, and targets.
    key: equal for batches of the same shapes in the same memory.
    """

    samples: int
    read: Callable[[], tuple[Tensor, Tensor]]
    key: Hashable


class Feed:
    """The batches of an epoch, step by step.

    Where the passes of workers are captured and the data lies on the device, reading is part of the passes: only the
    numbers of the samples are told anew, those of all workers in one copy.

    Args:
        data: that is read.
        sampler: says who sees which samples.
        comm: which workers are here.
        replayed: does the passes.
        memory_format: of images.
    """

    def __init__(
        self, data: Any, sampler: Sampler, comm: Comm, replayed: Replayed, memory_format: torch.memory_format
    ) -> None:
        self.data, self.sampler, self.comm, self.memory_format = data, sampler, comm, memory_format
        self.slots = Slots(replayed, memory_format)
        self.in_passes = replayed.captures(WORKERS) and getattr(data, "by_device", False)
        self._numbers: dict[tuple[int, ...], Tensor] = {}  # of samples [workers x batch], by the sizes of batches
        self._steps: Iterator[Sequence[Tensor]] = iter(())
        self._batches: Iterator[tuple[Tensor, Tensor]] = iter(())

    def begin_epoch(self, epoch: int, steps: range) -> None:
        """From here on, steps are these ones of an epoch whose order the sampler has drawn."""
        sampler = self.sampler  # a generator that knew this object, which keeps it, would outlive the run
        workers = range(self.comm.first_worker, self.comm.first_worker + self.comm.local_workers)
        numbers = ([sampler.batch(worker, step) for worker in workers] for step in steps)
        if self.in_passes:
            self.data.begin_epoch(epoch)
            self._steps = numbers
        else:
            self._batches = self.data.train_batches(epoch, (own for step in numbers for own in step))

    def step(self) -> Iterator[Own]:
        """The batch of each local worker, in the step that is next; the clock is told when a worker's turn comes."""
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
