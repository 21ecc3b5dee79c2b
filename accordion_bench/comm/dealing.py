"""Which samples each worker sees, where the number of workers changes in mid-run."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.tensors import keyed_rng


class Deal:
    """Deals the samples of one pass over the data after another, each in a keyed order, to the workers that are there.

        in step t since samples were last dealt, entry j of worker m of A gets the ((t b + j) A + m)-th of what is left

    When the workers change they are dealt anew, from where they stand. What a lost worker has computed since the last
    average that it took part in goes back, and is dealt first. So each sample of a pass is in one average, and no
    sample is in two. Where A b divides the samples and no worker is lost, workers see what `Sampler` gives them.

    Args:
        size: samples of a pass.
        batch: samples of a worker in a step, b.
        seed: of the run.
        workers: A.
        static: every pass has the same order.
    """

    def __init__(self, size: int, batch: int, seed: int, workers: int, static: bool = False) -> None:
        self.size, self.batch, self.seed, self.workers, self.static = size, batch, seed, workers, static
        self._left = torch.empty(0, dtype=torch.int64)  # that are dealt before those from `_next` on
        self._next = 0  # of pass p entry i is p size + i
        self._since = self._settled = 0  # steps: samples were dealt; an average was made
        self._orders: dict[int, Tensor] = {}

    def samples(self, worker: int, step: int) -> Tensor:
        """Numbers of the samples of one worker in a step of the run, [b]."""
        return self._numbers(self._entries(self._places([worker], step, step + 1)))

    def averaged(self, steps: int) -> None:
        """What has been computed in so many steps of the run is in an average."""
        self._settled = max(self._settled, steps)

    def change(self, workers: int, lost: Sequence[int], steps: int) -> None:
        """From here on there are other workers.

        Args:
            workers: how many.
            lost: numbers that those who are gone had.
            steps: that have been taken in the run.
        """
        dealt = (steps - self._since) * self.batch * self.workers
        back = self._entries(self._places(lost, max(self._settled, self._since), steps))
        self._next += max(0, dealt - len(self._left))
        self._left = torch.cat([back, self._left[dealt:]])
        self.workers, self._since = workers, steps

    def _places(self, workers: Sequence[int], first: int, last: int) -> Tensor:
        """Which entries of what is left some workers get from one step of the run on to before another one."""
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
        """For checkpoints, and for workers that enter."""
        places = {"left": self._left, "next": self._next, "since": self._since, "settled": self._settled}
        return {"deal": {"size": self.size, "batch": self.batch, "workers": self.workers, **places}}

    @classmethod
    def of_state(cls, state: dict[str, Any], seed: int) -> "Deal":
        """What `state_dict()` was made of, in a run with a seed."""
        told = state["deal"]
        deal = cls(told["size"], told["batch"], seed, told["workers"])
        deal.load_state_dict(state)
        return deal

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        told = state["deal"]
        self.size, self.batch, self.workers = told["size"], told["batch"], told["workers"]
        self._left, self._next = told["left"].clone(), told["next"]
        self._since, self._settled = told["since"], told["settled"]
