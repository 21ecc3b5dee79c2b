"""What a worker that enters a run gets from the others, and what changes where workers come and go."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accordion_bench.comm.dealing import Deal
from accordion_bench.loop.step import CommunicatingStep

State = dict[str, Any]


@dataclass(frozen=True)
class Hooks:
    """What only the loop knows.

    Args:
        state: gives what all workers have in common, and buffers of the model.
        put: goes on from what another one's `state` gave.
        deal: of samples; None = the loop has its own.
        changed: called after the workers have changed, with the ranks of those that were lost, and how many processes
            there were.
    """

    state: Callable[[], State]
    put: Callable[[State], None]
    deal: Callable[[], Deal | None]
    changed: Callable[[Sequence[int], int], None]


class SharedState:
    """The state that all workers share: the `Owner` of an elastic membership.

    A worker that enters goes on from what all have in common, with no residual; where workers take local steps that is
    the last consensus, and its inner optimizer is new.

    Args:
        step: whose scheme and replicas they are.
        hooks: of the loop.
    """

    def __init__(self, step: CommunicatingStep, hooks: Hooks) -> None:
        self.step, self.hooks = step, hooks

    def resized(self, lost: Sequence[int], before: int) -> None:
        """See `Owner`."""
        self.step.sync.resized()
        if before:
            self.hooks.changed(lost, before)

    def averaged(self) -> None:
        """See `Owner`."""
        if (deal := self.hooks.deal()) is not None:
            deal.averaged(self.step.steps)

    def shared_state(self) -> State:
        """See `Owner`."""
        return self.hooks.state()

    def take_over(self, state: State) -> None:
        """See `Owner`."""
        self.hooks.put(state)
        self.step.sync.restart()
