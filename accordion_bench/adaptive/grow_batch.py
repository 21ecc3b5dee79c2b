"""Grow the batch instead of decaying the learning rate."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from accordion_bench.adaptive.base import Policy
from accordion_bench.adaptive.batch_limits import float32, most, refuse_full
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import Ladder, Plan, RunFacts, Signals


def _smoke_options(options: Config, knob: str) -> Config:
    return {"cap": 8}


@with_options
class GrowBatch(Policy):
    """Where the schedule divides the learning rate by f, multiply the batch by f and keep the learning rate.

        wanted <- wanted * f,   B = min(round(wanted), cap),   LR = schedule * B / B_0

    LR / B, to which SGD's noise scale LR N / (B (1 - m)) is proportional, follows the schedule throughout, also where B
    is rounded or has reached its cap: from there on the learning rate decays. f is the ratio of the rates at the start
    of two epochs, so that a slow decay grows the batch a little in every epoch; rises (warm-up) change nothing.

    Source: Smith et al., ICLR 2018 (arXiv 1711.00489).
    """

    cap: int | None = option(
        "samples per worker and step; null = a tenth of the training samples over all workers (35 with digits)",
        default=None,
        at_least=1,
        instead=320,
    )

    chosen_as = {
        "grow_batch": Choice(
            "where the schedule divides the learning rate, multiply the batch and keep the learning rate (Smith et al. "
            "2018)"
        )
    }

    description = replace(Policy.description, smoke_options=_smoke_options)

    drives = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.wanted = 0.0
        self._decision: dict[str, Any] = {}

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        refuse_full("grow_batch", run)
        limit = most(run)
        self.first, self.wanted = run.batch_size, float(run.batch_size)
        self.most = self.cap or min(run.train_size // (10 * run.workers), limit)
        self.factors = [run.schedule(float(epoch)) for epoch in range(run.epochs)]
        if run.epochs > 1 and not any(after < before for before, after in itertools.pairwise(self.factors)):
            raise ConfigError(
                "adaptive.grow_batch needs a schedule that lowers the learning rate from one epoch to the next, got "
                "one that never does",
                lowering(run.schedule),
            )
        if not self.first < self.most <= limit:
            tenth = f" (null is a tenth of the samples over all workers, {self.most})" if self.cap is None else ""
            rule = f"above batch_size={self.first} and at most {limit}, the samples that a worker sees per epoch{tenth}"
            raise ValueRefused("cap", rule, self.cap, limit)
        return plan

    def update(self, signals: Signals, plan: Plan) -> Plan:
        self._decision = {}
        if not signals.next_lr < signals.lr:
            return plan
        self.wanted *= ratio(signals.lr, signals.next_lr)
        batch = self.at(self.wanted, plan.batch_size)
        factor = float32(batch / self.first)
        self._decision = {"batch_size": batch, "lr_factor": factor, "capped": batch == self.most}
        return replace(plan, batch_size=batch, lr_factor=factor)

    def at(self, wanted: float, batch: int) -> int:
        """The batch that comes after another where so many samples are wanted."""
        return self.most if wanted >= self.most else max(round(wanted), batch)

    def later_batches(self, first: int) -> Iterable[int]:
        wanted, batches = float(first), [first]
        for before, after in itertools.pairwise(self.factors):
            if after < before:
                wanted *= ratio(before, after)
                batches.append(self.at(wanted, batches[-1]))
        return batches[1:]

    def decision(self) -> dict[str, Any]:
        return self._decision

    def state_dict(self) -> dict[str, Any]:
        return {"wanted": self.wanted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.wanted = state["wanted"]


def ratio(before: float, after: float) -> float:
    """Of two learning rates."""
    return before / after if after else math.inf


def lowering(schedule: Any) -> dict[str, Any]:
    """The options with which a schedule lowers the learning rate."""
    if getattr(schedule, "gamma", 0) == 1:
        return {"schedule.gamma": 0.1}
    if hasattr(schedule, "milestones"):
        return {"schedule.milestones": [0.5, 0.8333]}
    if hasattr(schedule, "final"):
        return {"schedule.final": 0} if schedule.final == 1 else {"schedule.warmup_epochs": 0}
    return {"schedule": "multistep"}
