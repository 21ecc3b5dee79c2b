"""State for workers that join an elastic run, and callbacks for a change of the workers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accordion_bench.comm.membership import SampleAssignment
from accordion_bench.loop.step import CommunicatingStep

State = dict[str, Any]


@dataclass(frozen=True)
class Hooks:
    """Callbacks into the training loop."""

    state: Callable[[], State]  # returns the state that all workers share, and buffers of the model
    put: Callable[[State], None]  # restores the result of another worker's `state`
    deal: Callable[[], SampleAssignment | None]  # returns the assignment of samples; None = the loop assigns its own
    # called after the workers have changed, with the ranks of the lost processes and the previous number of processes
    changed: Callable[[Sequence[int], int], None]


class SharedState:
    """The state that all workers share: the `Owner` of an elastic membership.

    A worker that joins continues from the shared state, without a residual. If workers take local steps, the shared
    state is the last consensus, and the new worker's inner optimizer starts empty.
    """

    def __init__(self, step: CommunicatingStep, hooks: Hooks) -> None:
        self.step, self.hooks = step, hooks

    def resized(self, lost: Sequence[int], before: int) -> None:
        self.step.sync.resized()
        if before:
            self.hooks.changed(lost, before)

    def averaged(self) -> None:
        if (deal := self.hooks.deal()) is not None:
            deal.averaged(self.step.steps)

    def shared_state(self) -> State:
        return self.hooks.state()

    def take_over(self, state: State) -> None:
        self.hooks.put(state)
        self.step.sync.restart()
