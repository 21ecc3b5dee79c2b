"""Assignment of samples to workers in elastic runs, whose number of workers changes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.tensors import keyed_rng


class SampleAssignment:
    """Assigns the samples of each pass over the data, in a random order keyed by the seed, to the current workers.

        in step t since the last assignment, entry j of worker m of A gets remaining sample number (t b + j) A + m

    When the set of workers changes, the remaining samples are assigned again. Samples of a lost worker since its last
    average are assigned first. So each sample of a pass is in exactly one average. If A b divides the number of samples
    and no worker is lost, workers get the same samples as from `Sampler`.

    Args:
        size: number of samples of a pass.
        batch: number of samples per worker and step, b.
        seed: seed of the run.
        workers: number of workers, A.
        static: whether every pass has the same order.
    """

    def __init__(self, size: int, batch: int, seed: int, workers: int, static: bool = False) -> None:
        self.size, self.batch, self.seed, self.workers, self.static = size, batch, seed, workers, static
        self._left = torch.empty(0, dtype=torch.int64)  # returned samples, assigned before those from `_next` on
        self._next = 0  # first unassigned entry; entry i of pass p has number p size + i
        self._since = self._settled = 0  # steps of the last assignment, and of the last average
        self._orders: dict[int, Tensor] = {}

    def samples(self, worker: int, step: int) -> Tensor:
        """Return the indices of the samples of one worker in a step of the run, [b]."""
        return self._numbers(self._entries(self._places([worker], step, step + 1)))

    def averaged(self, steps: int) -> None:
        """Note that the results of the first `steps` steps are part of an average."""
        self._settled = max(self._settled, steps)

    def change(self, workers: int, lost: Sequence[int], steps: int) -> None:
        """Assign the remaining samples to a new set of workers.

        Args:
            workers: new number of workers.
            lost: previous numbers of the lost workers.
            steps: number of steps of the run so far.
        """
        dealt = (steps - self._since) * self.batch * self.workers
        back = self._entries(self._places(lost, max(self._settled, self._since), steps))
        self._next += max(0, dealt - len(self._left))
        self._left = torch.cat([back, self._left[dealt:]])
        self.workers, self._since = workers, steps

    def _places(self, workers: Sequence[int], first: int, last: int) -> Tensor:
        """Return the places, among the remaining samples, of some workers in the steps [first, last)."""
        turns = torch.arange((first - self._since) * self.batch, (last - self._since) * self.batch)
        return (turns[:, None] * self.workers + torch.tensor(list(workers), dtype=torch.int64)).flatten()

    def _entries(self, places: Tensor) -> Tensor:
        beyond = places - len(self._left) + self._next
        before = places < len(self._left)
        beyond[before] = self._left[places[before]]
        return beyond

    def _numbers(self, entries: Tensor) -> Tensor:
        passes, within = entries // self.size, entries % self.size
        numbers = torch.empty_like(within)
        for number in passes.unique().tolist():
            here = passes == number
            numbers[here] = self._order(0 if self.static else number)[within[here]]
        return numbers

    def _order(self, number: int) -> Tensor:
        if number not in self._orders:
            generator = keyed_rng.generator(self.seed, "order", number)
            before = list(self._orders.items())[-1:]
            self._orders = {**dict(before), number: torch.randperm(self.size, generator=generator)}
        return self._orders[number]

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints and entering workers."""
        places = {"left": self._left, "next": self._next, "since": self._since, "settled": self._settled}
        return {"deal": {"size": self.size, "batch": self.batch, "workers": self.workers, **places}}

    @classmethod
    def of_state(cls, state: dict[str, Any], seed: int) -> "SampleAssignment":
        """Create an instance from a `state_dict()` and the seed of the run."""
        told = state["deal"]
        deal = cls(told["size"], told["batch"], seed, told["workers"])
        deal.load_state_dict(state)
        return deal

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict()`."""
        told = state["deal"]
        self.size, self.batch, self.workers = told["size"], told["batch"], told["workers"]
        self._left, self._next = told["left"].clone(), told["next"]
        self._since, self._settled = told["since"], told["settled"]
