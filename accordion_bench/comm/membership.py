"""Interface to the set of processes of a run, which is fixed or elastic, and the assignment of samples to them."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from accordion_bench.tensors import keyed_rng

T = TypeVar("T")
Undo = Callable[[], None]


def nothing() -> None:
    """Do nothing: an `Undo` of an operation that changes nothing."""


class Membership:
    """Fixed set of processes: a lost process ends the run."""

    elastic = False  # whether processes may be lost and others may enter during the run
    changed = False  # whether a process has been lost or has entered since the run started

    def together(self, do: Callable[[], T], undo: Undo = nothing) -> T:
        """Return the result of a collective operation, which all members call at the same point.

        If a member was lost, `undo` reverts its changes, and it is called again.
        """
        return do()

    def repeated(
        self, begin: Callable[[], Callable[[], T]], again: Callable[[], T], keep: Callable[[], Undo]
    ) -> Callable[[], T]:
        """Start an exchange of all members; return a function that waits for it and returns its result.

        `again` runs the exchange again if a member was lost; `keep` copies the state that it changes, and returns the
        function that restores it.
        """
        return begin()

    def border(self) -> None:
        """Let waiting processes enter between two steps, if an exchange of all members has just ended."""

    def columns(self) -> dict[str, Any]:
        """Return columns for metrics rows."""
        return {}

    def leave(self, over: bool = True) -> None:
        """Leave the run; if it is over, no process may enter any more."""


class LeftBehind(RuntimeError):
    """This process cannot continue as a member; the message gives the reason and what to do."""


class TooFewLeft(LeftBehind):
    """No process can continue, because too few are left."""


class Owner(Protocol):
    """Owner of the state that is equal on all members."""

    def resized(self, lost: Sequence[int], before: int) -> None:
        """Adapt to new processes and a new rank; `lost` are previous ranks, `before` is the previous number."""

    def averaged(self) -> None:
        """Note that an exchange of all members is complete, of all tensors or of a fragment."""

    def shared_state(self) -> dict[str, Any]:
        """Return the state that an entering process needs; loads with `weights_only=True`."""

    def take_over(self, state: dict[str, Any]) -> None:
        """Restore the `shared_state()` of another process."""


class SampleAssignment:
    """Assigns the samples of each pass over the data, in a random order keyed by the seed, to the current workers.

        in step t since the last assignment, entry j of worker m of A gets remaining sample number (t b + j) A + m

    When the set of workers changes, the remaining samples are assigned again. Samples of a lost worker since its last
    average are assigned first. So each sample of a pass is in exactly one average. If A b divides the number of samples
    and no worker is lost, workers get the same samples as from `Sampler`.

    Args:
        size: number of samples of a pass.
        batch, workers: number of samples per worker and step, b, and of workers, A.
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
        """Assign the remaining samples to this many workers after `steps` steps; `lost` are previous numbers."""
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
