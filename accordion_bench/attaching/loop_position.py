"""Position of a user's loop; facts that the user has not passed are read from the optimizer."""

from collections.abc import Callable
from typing import Any

from accordion_bench.plan import Plan
from accordion_bench.position import Position

UNKNOWN = 2**31  # number of epochs, or of steps per epoch, that is not known


class LoopPosition(Position):
    """Current step and epoch of a user's loop.

    Args:
        plan: current plan.
        rate: returns the current learning rate of the first tensor.
        schedule: function from the time in epochs to the learning rate; None = only the current one is known.
        epochs: number of epochs of the training; None = unknown.
        steps: optimizer steps per epoch; None = unknown.

    Attributes:
        next_lr: learning rate at the start of the next epoch, while an epoch ends.
    """

    def __init__(
        self,
        plan: Plan,
        rate: Callable[[], float],
        schedule: Callable[[float], float] | None = None,
        epochs: int | None = None,
        steps: int | None = None,
    ) -> None:
        super().__init__(plan, 1.0, schedule or (lambda _: 1.0), epochs or UNKNOWN, lambda _: steps or UNKNOWN)
        self.rate, self.scheduled, self.known_steps = rate, schedule is not None, steps
        self.epoch_lr = self.step_lr = rate()
        self.next_lr: float | None = None

    def note_rate(self) -> None:
        """Set the learning rate of the next step to the current one."""
        self.step_lr = self.rate()
        if self.step_in_epoch == 0:
            self.epoch_lr = self.step_lr

    def lr(self, step_in_epoch: int | None = None, epoch: int | None = None) -> float:
        """Return the learning rate of a step: that of the schedule, else the current one or that of the first step."""
        if self.scheduled:
            return super().lr(step_in_epoch, epoch)
        if epoch is not None and epoch > self.epoch:
            return self.step_lr if self.next_lr is None else self.next_lr
        return self.epoch_lr if step_in_epoch == 0 else self.step_lr

    def end_lr(self) -> float:
        return super().end_lr() if self.scheduled else self.step_lr

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rates": [self.epoch_lr, self.step_lr]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.epoch_lr, self.step_lr = state["rates"]
