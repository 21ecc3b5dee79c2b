"""Linear warm-up from almost nothing, then cosine decay: the schedule of transformers."""

import math
from dataclasses import field, replace
from typing import Any

from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.schedules.base import Schedule


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    if context.workers == 1:
        yield "lr_scaling", "one worker's learning rate is not scaled"
    if options.get("warmup") == 0:
        yield "start", "schedule.warmup is 0"


@with_options
class WarmupCosine(Schedule):
    """factor(e) = s (start + (1 - start) e / w) until epoch w, then from s down to s x final along half a cosine.

    Step by step; unlike the other schedules it also warms up where s is 1.
    """

    warmup_epochs: int = field(init=False, default=0)
    warmup: int | float = option("share of the run, or epochs from 1 up; 0 = none", default=0.05, at_least=0)
    start: float = option("share of the peak learning rate in the first step", default=0.01, above=0, at_most=1)
    final: float = option("share of the peak learning rate at the end", default=0.1, at_least=0, at_most=1)

    chosen_as = {
        "warmup_cosine": Choice("warm-up from almost nothing and cosine decay, step by step: for transformers")
    }

    description = replace(Schedule.description, idle=_idle)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup >= self.epochs:
            raise ValueRefused("warmup", f"shorter than the run of epochs={self.epochs}", self.warmup, 0.05)
        self.until = self.warmup * self.epochs if self.warmup < 1 else self.warmup

    @property
    def rises_until(self) -> float:
        return self.until

    def __call__(self, epoch: float) -> float:
        if epoch < self.until:
            return self.scale * (self.start + (1 - self.start) * epoch / self.until)
        done = min((epoch - self.until) / (self.epochs - self.until), 1.0)
        return self.scale * (self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2)
