"""Linear warm-up from almost nothing, then cosine decay: the schedule of transformers."""

import math
from dataclasses import replace
from typing import Any

from accordion_bench.options import checks
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.schedules.base import Schedule


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    if context.workers == 1:
        yield "lr_scaling", "one worker's learning rate is not scaled"
    if options.get("warmup") == 0:
        yield "start", "schedule.warmup is 0"


class WarmupCosine(Schedule):
    """factor(e) = s (start + (1 - start) e / w) until epoch w, then from s down to s x final along half a cosine.

    Step by step; unlike the other schedules it also warms up where s is 1.

    Args:
        epochs, workers, lr_scaling: see `Schedule`.
        warmup: w, a share of the run below 1 or epochs from 1 up; 0 = none.
        start: share of the peak learning rate in the first step.
        final: share of the peak learning rate at the end of the run.
    """

    description = replace(Schedule.description, idle=_idle)

    def __init__(
        self,
        epochs: int,
        workers: int,
        warmup: float = 0.05,
        start: float = 0.01,
        final: float = 0.1,
        lr_scaling: str = "linear",
    ) -> None:
        super().__init__(epochs, workers, 0, lr_scaling)
        checks.number("warmup", warmup, at_least=0, instead=0.05)
        if warmup >= epochs:
            raise checks.ValueRefused("warmup", f"shorter than the run of epochs={epochs}", warmup, 0.05)
        self.until = warmup * epochs if warmup < 1 else warmup
        self.start = checks.number("start", start, above=0, at_most=1, instead=0.01)
        self.final = checks.number("final", final, at_least=0, at_most=1, instead=0.1)

    @property
    def rises_until(self) -> float:
        return self.until

    def __call__(self, epoch: float) -> float:
        if epoch < self.until:
            return self.scale * (self.start + (1 - self.start) * epoch / self.until)
        done = min((epoch - self.until) / (self.epochs - self.until), 1.0)
        return self.scale * (self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2)
