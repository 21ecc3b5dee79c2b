"""Step decay at milestones, with linear warm-up."""

import itertools
from dataclasses import replace
from typing import Any

from accordion_bench.options import checks
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
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


class MultiStep(Schedule):
    """factor(e) = warm-up(e) x gamma^(milestones reached by e), constant within an epoch.

    Args:
        milestones: each a share of the run below 1 (0.5 of 300 epochs = epoch 150; at the least epoch 1), or an epoch
            from 1 up. Shares are rounded to epochs; of a short run several may fall on one, which then decays once for
            each of them (0.5 and 0.8333 of 3 epochs: to 0.01 from epoch 2 on).
        gamma: decay at each milestone.
        lag: the timing of Accordion's code: warm-up one epoch late, decays two epochs late (152 and 252 of 300).
        epochs, workers, warmup_epochs, lr_scaling: see `Schedule`.
    """

    description = replace(Schedule.description, idle=_idle)

    def __init__(
        self,
        epochs: int,
        workers: int,
        milestones=(0.5, 0.8333),
        gamma: float = 0.1,
        lag: bool = False,
        **warmup,
    ) -> None:
        super().__init__(epochs, workers, **warmup)
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
        self.gamma = checks.number("gamma", gamma, above=0, at_most=1, instead=0.1)
        self.lag = checks.boolean("lag", lag, instead=False)

    @property
    def rises_until(self) -> float:
        return super().rises_until + (self.lag and super().rises_until > 0)

    def __call__(self, epoch: float) -> float:
        epoch = int(epoch)
        warm, cut = (max(epoch - 1, 0), epoch - 2) if self.lag else (epoch, epoch)
        return self.warmup(warm) * self.gamma ** sum(cut >= milestone for milestone in self.milestones)
