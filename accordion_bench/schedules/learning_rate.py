"""Schedules: the learning rate as a multiple of `optimizer.lr`, as a function of the epoch."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

from accordion_bench.options import checks
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.component import Component, Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.options.units import counted


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    if options.get("lr_scaling") == "none":
        yield "warmup_epochs", "schedule.lr_scaling=none warms up to 1"
    if context.workers == 1:
        yield "warmup_epochs", "one worker has nothing to warm up to"
        yield "lr_scaling", "one worker's learning rate is not scaled"


@with_options
class Schedule(Component):
    """factor(e) = warm-up from 1 to the scale s over the first epochs, times a decay.

    `epochs` is the length of the run. The warm-up is 1 + (s - 1) min(e / warmup_epochs, 1); s is A (`linear`), sqrt(A)
    or 1 (`none`) for A = `workers`.
    """

    epochs: int
    workers: int
    warmup_epochs: int = option("epochs of linear warm-up to the scaled learning rate; 0 = none", default=5, at_least=0)
    lr_scaling: str = option(
        "scaling with the number of workers: linear, sqrt, none",
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
        """Epoch from which on the learning rate does not rise; 0 if it never rises."""
        return self.warmup_epochs if self.scale != 1 else 0

    def warmed(self, epoch: float) -> float:
        """Return 1 + (s - 1) min(epoch / warmup_epochs, 1)."""
        done = 1.0 if self.warmup_epochs == 0 else min(epoch / self.warmup_epochs, 1.0)
        return 1 + (self.scale - 1) * done

    def __call__(self, epoch: float) -> float:
        """Return the factor at a fractional epoch; 2.5 is the middle of the third epoch."""
        raise NotImplementedError


@with_options
class Constant(Schedule):
    """factor(e) = warm-up(e), constant within an epoch; for policies that lower the learning rate themselves."""

    chosen_as = {
        "constant": Choice("linear warm-up, then constant: for policies that lower the learning rate themselves")
    }

    def __call__(self, epoch: float) -> float:
        return self.warmed(int(epoch))


def _multistep_idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Schedule.description.idle(cls, options, context)
    milestones = options.get("milestones")
    if milestones == []:
        yield "gamma", "schedule.milestones is empty"
    if options.get("gamma") == 1:
        yield "milestones", "schedule.gamma is 1"
    if milestones and min(milestones) >= context.epochs:
        yield "milestones", f"the run has {counted(context.epochs, 'epoch')}"


@with_options
class MultiStep(Schedule):
    """factor(e) = warm-up(e) x gamma^(milestones reached by e), constant within an epoch.

    A milestone is a share of the run below 1 (0.5 of 300 epochs = epoch 150; at least epoch 1), or an epoch of at least
    1. Shares are rounded to epochs. In a short run several may coincide, and the factor then decays once for each of
    them (0.5 and 0.8333 of 3 epochs: to 0.01 from epoch 2 on). With `lag` the warm-up is one epoch late, and decays are
    two epochs late.
    """

    milestones: Sequence[float] = option("shares of the run, or epochs: 150 and 250 of 300", default=(0.5, 0.8333))
    gamma: float = option("decay at each milestone", default=0.1, above=0, at_most=1)
    lag: bool = option("the timing of Accordion's code: 152 and 252", default=False)

    chosen_as = {"multistep": Choice("step decay with linear warm-up from optimizer.lr to the scaled one")}

    description = replace(Schedule.description, idle=_multistep_idle)

    def __post_init__(self) -> None:
        super().__post_init__()
        milestones, epochs = self.milestones, self.epochs
        if not isinstance(milestones, list | tuple):
            raise checks.ValueRefused("milestones", "a list", milestones, [0.5, 0.8333])
        for milestone in milestones:
            try:
                checks.number("milestones", milestone, above=0, instead=0.5)
            except checks.ValueRefused as refused:
                raise checks.ValueRefused("milestones", refused.rule, milestone, [0.5, 0.8333]) from None
        reached = [m * epochs if m < 1 else m for m in milestones]
        if any(later <= earlier for earlier, later in itertools.pairwise(reached)):
            rising = [m for _, m in sorted(dict(zip(reached, milestones, strict=True)).items())]
            rule = f"rising, in a run of {counted(epochs, 'epoch')}"
            raise checks.ValueRefused("milestones", rule, list(milestones), rising)
        self.milestones = [max(round(m * epochs), 1) if m < 1 else m for m in milestones]

    @property
    def rises_until(self) -> float:
        return super().rises_until + (self.lag and super().rises_until > 0)

    def __call__(self, epoch: float) -> float:
        epoch = int(epoch)
        warm, cut = (max(epoch - 1, 0), epoch - 2) if self.lag else (epoch, epoch)
        return self.warmed(warm) * self.gamma ** sum(cut >= milestone for milestone in self.milestones)


def _cosine_idle(cls: Any, options: Config, context: RunContext) -> Idle:
    for key, why in Schedule.description.idle(cls, options, context):
        if key != "warmup_epochs":  # the cosine starts after the warm-up even if that is flat
            yield key, why


@with_options
class Cosine(Schedule):
    """factor(e) = warm-up(e), then from s down to s x final along half a cosine, updated every step."""

    final: float = option("share of the peak learning rate at the end", default=0.0, at_least=0, at_most=1)

    chosen_as = {"cosine": Choice("cosine decay with linear warm-up, updated every step")}

    description = replace(Schedule.description, idle=_cosine_idle)

    def __call__(self, epoch: float) -> float:
        if epoch < self.warmup_epochs:
            return self.warmed(epoch)
        done = min((epoch - self.warmup_epochs) / max(self.epochs - self.warmup_epochs, 1), 1.0)
        return self.scale * (self.final + (1 - self.final) * (1 + math.cos(math.pi * done)) / 2)


def _warmup_cosine_idle(cls: Any, options: Config, context: RunContext) -> Idle:
    if context.workers == 1:
        yield "lr_scaling", "one worker's learning rate is not scaled"
    if options.get("warmup") == 0:
        yield "start", "schedule.warmup is 0"


@with_options
class WarmupCosine(Schedule):
    """factor(e) = s (start + (1 - start) e / w) until epoch w, then from s down to s x final along half a cosine.

    Updated every step. Unlike the other schedules it also warms up if s is 1.
    """

    warmup_epochs: int = field(init=False, default=0)
    warmup: int | float = option("share of the run, or epochs if at least 1; 0 = none", default=0.05, at_least=0)
    start: float = option("share of the peak learning rate in the first step", default=0.01, above=0, at_most=1)
    final: float = option("share of the peak learning rate at the end", default=0.1, at_least=0, at_most=1)

    chosen_as = {
        "warmup_cosine": Choice("warm-up from almost 0 and cosine decay, updated every step: for transformers")
    }

    description = replace(Schedule.description, idle=_warmup_cosine_idle)

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
