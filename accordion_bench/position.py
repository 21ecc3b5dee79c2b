"""Where a run stands: epoch, step, plan, and the learning rate that follows from them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accordion_bench.plan import Plan

Rate = float | Sequence[float]
"""A learning rate: one for all tensors, or one for each."""


@dataclass(frozen=True)
class StepInfo:
    """What an exchange is told of the step in which it takes place.

    Args:
        plan: levels and codebooks.
        step: optimizer steps taken before.
        lr: learning rate of this step, one for all tensors or one for each; 1 where what is exchanged is in the units
            of the parameters.
        epoch: epochs passed, for warm-ups.
    """

    plan: Plan
    step: int = 0
    lr: Rate = 1.0
    epoch: float = 0.0


@dataclass
class Position:
    """Where training stands; the loop moves it on, schemes and policies read it.

    Args:
        plan: in force now; policies replace it.
        base_lr: learning rate before schedule and plan.
        schedule: learning-rate factor at a time in epochs.
        epochs: of the run.
        steps_of: optimizer steps per epoch at a batch size (samples per worker and step).
        epoch, step, step_in_epoch: epochs, steps, and steps of this epoch, that are over.
    """

    plan: Plan
    base_lr: float
    schedule: Callable[[float], float]
    epochs: int
    steps_of: Callable[[int], int]
    epoch: int = 0
    step: int = 0
    step_in_epoch: int = 0

    @property
    def steps_per_epoch(self) -> int:
        """At the present batch size."""
        return self.steps_of(self.plan.batch_size)

    @property
    def steps_left(self) -> int:
        """Optimizer steps to the end of the run, at the present batch size."""
        return (self.epochs - self.epoch) * self.steps_per_epoch - self.step_in_epoch

    @property
    def now(self) -> float:
        """Epochs passed."""
        return self.at(self.step_in_epoch)

    def at(self, step_in_epoch: int, epoch: int | None = None) -> float:
        """Epochs passed before a step (of this epoch, unless another is named)."""
        return (self.epoch if epoch is None else epoch) + step_in_epoch / self.steps_per_epoch

    def lr(self, step_in_epoch: int | None = None, epoch: int | None = None) -> float:
        """Learning rate of a step, the coming one unless another is named: base_lr x schedule x plan."""
        step_in_epoch = self.step_in_epoch if step_in_epoch is None else step_in_epoch
        return self.base_lr * self.schedule(self.at(step_in_epoch, epoch)) * self.plan.lr_factor

    def end_lr(self) -> float:
        """Learning rate with which this epoch ends, an instant before the next one."""
        return self.base_lr * self.schedule(math.nextafter(self.epoch + 1, 0)) * self.plan.lr_factor

    def info(self, lr: Rate = 1.0) -> StepInfo:
        """What an exchange in the coming step is told."""
        return StepInfo(self.plan, self.step, lr, self.now)

    def step_taken(self) -> None:
        """One more step is over."""
        self.step += 1
        self.step_in_epoch += 1

    def epoch_over(self) -> None:
        """One more epoch is over."""
        self.epoch += 1
        self.step_in_epoch = 0

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        plan = {
            "levels": dict(self.plan.levels),
            "batch_size": self.plan.batch_size,
            "lr_factor": self.plan.lr_factor,
            "period": self.plan.period,
            "codebooks": dict(self.plan.codebooks),
        }
        return {"plan": plan, "epoch": self.epoch, "step": self.step, "step_in_epoch": self.step_in_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.plan = Plan(**state["plan"])
        self.epoch, self.step, self.step_in_epoch = state["epoch"], state["step"], state["step_in_epoch"]
