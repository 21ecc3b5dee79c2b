"""Linear warm-up and scaling with the number of workers, shared by all schedules."""

import math
from dataclasses import replace
from typing import Any

from accordion_bench.options.component import Component, Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import option, with_options


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    if options.get("lr_scaling") == "none":
        yield "warmup_epochs", "schedule.lr_scaling=none warms up to 1"
    if context.workers == 1:
        yield "warmup_epochs", "one worker has nothing to warm up to"
        yield "lr_scaling", "one worker's learning rate is not scaled"


@with_options
class Schedule(Component):
    """factor(e) = warm-up from 1 to the scale s over the first epochs, times a decay.

    `epochs` is the length of the run. The warm-up is 1 + (s - 1) min(e / warmup_epochs, 1); s is A (`linear`), sqrt(A)
    or 1 for A = `workers`.
    """

    epochs: int
    workers: int
    warmup_epochs: int = option("of linear warm-up to the scaled learning rate; 0 = none", default=5, at_least=0)
    lr_scaling: str = option(
        "with the number of workers: linear, sqrt, none",
        default="linear",
        choices=("linear", "sqrt", "none"),
        brought=True,
    )

    description = replace(Component.description, idle=_idle)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scale = {"linear": float(self.workers), "sqrt": math.sqrt(self.workers), "none": 1.0}[self.lr_scaling]

    @property
    def rises_until(self) -> float:
        """The epoch from which on the learning rate does not rise; 0 where it never does."""
        return self.warmup_epochs if self.scale != 1 else 0

    def warmed(self, epoch: float) -> float:
        """1 + (s - 1) min(epoch / warmup_epochs, 1)."""
        done = 1.0 if self.warmup_epochs == 0 else min(epoch / self.warmup_epochs, 1.0)
        return 1 + (self.scale - 1) * done

    def __call__(self, epoch: float) -> float:
        """The factor at a point in time, e.g. 2.5 = in the middle of the third epoch."""
        raise NotImplementedError
