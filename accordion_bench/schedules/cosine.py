"""Cosine decay, with linear warm-up."""

import math
from dataclasses import replace
from typing import Any

from accordion_bench.options import checks
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.schedules.base import Schedule


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    for key, why in Schedule.description.idle(cls, options, context):
        if key != "warmup_epochs":  # the cosine begins after them, however flat they are
            yield key, why


class Cosine(Schedule):
    """factor(e) = warm-up(e), then from s down to s x final along half a cosine, step by step.

    Args:
        final: share of the peak learning rate at the end of the run.
        epochs, workers, warmup_epochs, lr_scaling: see `Schedule`.
    """

    description = replace(Schedule.description, idle=_idle)

    def __init__(self, epochs: int, workers: int, final: float = 0.0, **warmup) -> None:
        super().__init__(epochs, workers, **warmup)
        self.final = checks.number("final", final, at_least=0, at_most=1, instead=0)

    def __call__(self, epoch: float) -> float:
        if epoch < self.warmup_epochs:
            return self.warmup(epoch)
        done = min((epoch - self.warmup_epochs) / max(self.epochs - self.warmup_epochs, 1), 1.0)
        return self.scale * (self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2)
