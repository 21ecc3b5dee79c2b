"""Step decay at milestones, with linear warm-up."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from accordion_bench.options import checks
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.options.units import counted
from accordion_bench.schedules.base import Schedule


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
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

    A milestone is a share of the run below 1 (0.5 of 300 epochs = epoch 150; at the least epoch 1), or an epoch from 1
    up. Shares are rounded to epochs; of a short run several may fall on one, which then decays once for each of them
    (0.5 and 0.8333 of 3 epochs: to 0.01 from epoch 2 on). With `lag` warm-up is one epoch late, and decays are two
    epochs late.
    """

    milestones: Sequence[float] = option("shares of the run, or epochs: 150 and 250 of 300", default=(0.5, 0.8333))
    gamma: float = option("decay at each milestone", default=0.1, above=0, at_most=1)
    lag: bool = option("the timing of Accordion's code: 152 and 252", default=False)

    chosen_as = {"multistep": Choice("step decay with linear warm-up from optimizer.lr to the scaled one")}

    description = replace(Schedule.description, idle=_idle)

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
