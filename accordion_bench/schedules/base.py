"""Linear warm-up and scaling with the number of workers, shared by all schedules."""

import math
from dataclasses import replace
from typing import Any

from accordion_bench.options import checks
from accordion_bench.options.component import Component, Idle, Surroundings
from accordion_bench.options.instantiate import Config


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    if options.get("lr_scaling") == "none":
        yield "warmup_epochs", "schedule.lr_scaling=none warms up to 1"
    if context.workers == 1:
        yield "warmup_epochs", "one worker has nothing to warm up to"
        yield "lr_scaling", "one worker's learning rate is not scaled"


class Schedule(Component):
    """factor(e) = warm-up from 1 to the scale s over the first epochs, times a decay.

    Args:
        epochs: length of the run.
        workers: A.
        warmup_epochs: epochs of linear warm-up, 1 + (s - 1) min(e / warmup_epochs, 1); 0 = none.
        lr_scaling: s for A workers: `linear` A, `sqrt` sqrt(A), `none` 1.
    """

    description = replace(Component.description, idle=_idle)

    def __init__(self, epochs: int, workers: int, warmup_epochs: int = 5, lr_scaling: str = "linear") -> None:
        self.epochs = epochs
        self.warmup_epochs = checks.integer("warmup_epochs", warmup_epochs, at_least=0)
        checks.choice("lr_scaling", lr_scaling, ["linear", "sqrt", "none"])
        self.scale = {"linear": float(workers), "sqrt": math.sqrt(workers), "none": 1.0}[lr_scaling]

    @property
    def rises_until(self) -> float:
        """The epoch from which on the learning rate does not rise; 0 where it never does."""
        return self.warmup_epochs if self.scale != 1 else 0

    def warmup(self, epoch: float) -> float:
        """1 + (s - 1) min(epoch / warmup_epochs, 1)."""
        done = 1.0 if self.warmup_epochs == 0 else min(epoch / self.warmup_epochs, 1.0)
        return 1 + (self.scale - 1) * done

    def __call__(self, epoch: float) -> float:
        """The factor at a point in time, e.g. 2.5 = in the middle of the third epoch."""
        raise NotImplementedError
