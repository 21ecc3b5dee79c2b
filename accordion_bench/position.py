"""Position of a run: epoch, step, plan, and the learning rate that follows from them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accordion_bench.plan import Plan

Rate = float | Sequence[float]
"""A learning rate: one for all tensors, or one per tensor."""


@dataclass(frozen=True)
class StepInfo:
    """Facts about the current step that an exchange uses.

    Args:
        plan: levels and codebooks.
        step: number of optimizer steps before this one.
        lr: learning rate of this step, for all tensors or per tensor; 1 if exchanged values have the parameters' units.
        epoch: epochs passed, for warm-ups.
    """

    plan: Plan
    step: int = 0
    lr: Rate = 1.0
    epoch: float = 0.0


@dataclass
class Position:
    """Current position of training; the loop advances it, schemes and policies read it.

    Args:
        plan: current plan, which policies replace.
        base_lr: learning rate before schedule and plan.
        schedule: learning-rate factor as a function of time in epochs.
        epochs: number of epochs of the run.
        steps_of: function from batch size (samples per worker and step) to optimizer steps per epoch.
        epoch, step, step_in_epoch: completed epochs, steps, and steps of this epoch.
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
        """Number of steps per epoch at the current batch size."""
        return self.steps_of(self.plan.batch_size)

    @property
    def steps_left(self) -> int:
        """Number of optimizer steps until the end of the run, at the current batch size."""
        return (self.epochs - self.epoch) * self.steps_per_epoch - self.step_in_epoch

    @property
    def now(self) -> float:
        """Epochs passed."""
        return self.at(self.step_in_epoch)

    def at(self, step_in_epoch: int, epoch: int | None = None) -> float:
        """Return the epochs passed before a step, by default of the current epoch."""
        return (self.epoch if epoch is None else epoch) + step_in_epoch / self.steps_per_epoch

    def lr(self, step_in_epoch: int | None = None, epoch: int | None = None) -> float:
        """Return the learning rate of a step, by default the next one: base_lr x schedule x plan."""
        step_in_epoch = self.step_in_epoch if step_in_epoch is None else step_in_epoch
        return self.base_lr * self.schedule(self.at(step_in_epoch, epoch)) * self.plan.lr_factor

    def end_lr(self) -> float:
        """Return the learning rate at the end of this epoch, immediately before the next one."""
        return self.base_lr * self.schedule(math.nextafter(self.epoch + 1, 0)) * self.plan.lr_factor

    def info(self, lr: Rate = 1.0) -> StepInfo:
        """Return the facts for an exchange in the next step."""
        return StepInfo(self.plan, self.step, lr, self.now)

    def step_taken(self) -> None:
        """Count a step."""
        self.step += 1
        self.step_in_epoch += 1

    def epoch_over(self) -> None:
        """Count an epoch."""
        self.epoch += 1
        self.step_in_epoch = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
        plan = {
            "levels": dict(self.plan.levels),
            "batch_size": self.plan.batch_size,
            "lr_factor": self.plan.lr_factor,
            "period": self.plan.period,
            "codebooks": dict(self.plan.codebooks),
        }
        return {"plan": plan, "epoch": self.epoch, "step": self.step, "step_in_epoch": self.step_in_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        self.plan = Plan(**state["plan"])
        self.epoch, self.step, self.step_in_epoch = state["epoch"], state["step"], state["step_in_epoch"]
