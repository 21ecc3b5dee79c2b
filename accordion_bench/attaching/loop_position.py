"""Where a user's loop stands: what the user has not told is taken from the optimizer."""

from collections.abc import Callable
from typing import Any

from accordion_bench.plan import Plan
from accordion_bench.position import Position

UNKNOWN = 2**31  # epochs, or steps in one, of which nothing was said


class LoopPosition(Position):
    """Counts the steps of a loop that the user drives.

    Args:
        plan: in force now.
        rate: the learning rate that is set now, of the first tensor.
        schedule: learning rate at a time in epochs; None = only what is set now is known.
        epochs: of the training; None = not known.
        steps: optimizer steps per epoch; None = not known.

    Attributes:
        next_lr: learning rate with which the next epoch starts, where an epoch is about to end.
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
        """The learning rate that is set now is that of the coming step."""
        self.step_lr = self.rate()
        if self.step_in_epoch == 0:
            self.epoch_lr = self.step_lr

    def lr(self, step_in_epoch: int | None = None, epoch: int | None = None) -> float:
        """Learning rate of a step: as scheduled, else what is set now, or was in the first step of the epoch."""
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
