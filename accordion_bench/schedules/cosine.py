"""Cosine decay, with linear warm-up."""

import math
from dataclasses import replace
from typing import Any

from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.schedules.base import Schedule


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    for key, why in Schedule.description.idle(cls, options, context):
        if key != "warmup_epochs":  # the cosine begins after them, however flat they are
            yield key, why


@with_options
class Cosine(Schedule):
    """factor(e) = warm-up(e), then from s down to s x final along half a cosine, step by step."""

    final: float = option("share of the peak learning rate at the end", default=0.0, at_least=0, at_most=1)

    chosen_as = {"cosine": Choice("cosine decay with linear warm-up, step by step")}

    description = replace(Schedule.description, idle=_idle)

    def __call__(self, epoch: float) -> float:
        if epoch < self.warmup_epochs:
            return self.warmed(epoch)
        done = min((epoch - self.warmup_epochs) / max(self.epochs - self.warmup_epochs, 1), 1.0)
        return self.scale * (self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2)
