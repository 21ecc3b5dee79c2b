"""QSR: the period between averagings grows as the learning rate falls, by the quadratic synchronisation rule."""

import itertools
import math
from dataclasses import replace
from typing import Any

from accordion_bench.adaptive.base import Policy
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import Ladder, Plan, RunFacts, Signals

EXACT = 1 + 1e-9  # a power that is an integer may come out a rounding error below it: (0.3 / 0.1)^2


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    yield from Policy.description.idle(cls, options, context)
    if options.get("base_period") is not None:
        yield "sync.period", f"{context.group}.base_period sets the first one"


@with_options
class QSR(Policy):
    """H = max(H_base, floor((alpha / eta)^exponent)), at most the steps left, at least 1.

    eta is the learning rate of the next step, as the schedule and the number of workers have scaled it. Decided after
    every averaging, for the round that begins. At a learning rate of 0 the workers average at the end only.

    The default `alpha` is for the default run, whose learning rate goes 0.4, 0.04, 0.004: periods 8, 25, and once at
    the end; other optimizers and schedules need their own, about half of the peak learning rate.

    Source: Gu et al., ICLR 2024 (arXiv 2310.14423) and its official code.
    """

    alpha: float = option(
        "learning rate at which the rule gives 1, about half of the peak; higher = longer periods; 0 = base_period "
        "throughout",
        default=0.2,
        at_least=0,
    )
    base_period: int | None = option(
        "the shortest period after warm-up; null = sync.period", default=None, at_least=1, instead=8
    )
    warmup_period: int | None = option("period during warm-up; null = base_period", default=None, at_least=1, instead=8)
    exponent: float = option("2 in the paper", default=2.0, above=0)

    chosen_as = {
        "qsr": Choice(
            "the period between averagings grows as the learning rate falls (Gu et al. 2024); chooses sync=local_sgd",
            selects={"sync": "local_sgd"},
        )
    }

    description = replace(Policy.description, idle=_idle)

    drives = "period"
    plans_with = frozenset({"epochs", "steps_per_epoch", "schedule"})
    when = "exchange"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._decision: dict[str, Any] = {}

    def due(self, exchange: int) -> bool:
        return True

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        if self.alpha and not decays(run):
            raise ConfigError(
                "adaptive=qsr needs a schedule that lowers the learning rate, got one that never does",
                {"schedule": "cosine"},
                {"adaptive.qsr.alpha": 0},
            )
        self.base = plan.period if self.base_period is None else self.base_period
        self.warm = self.base if self.warmup_period is None else self.warmup_period
        self._epochs = run.epochs
        return replace(plan, period=self.warm if run.warmup_epochs else self.base)

    def owed_to_length(self, epochs: int) -> Any:
        return self._epochs  # its last rounds are cut at the end of the run

    def period(self, lr: float, steps_left: int) -> int:
        """H for a learning rate."""
        if not self.alpha:
            return max(1, min(self.base, steps_left))
        try:
            power = (self.alpha / lr) ** self.exponent * EXACT
        except (ZeroDivisionError, OverflowError):
            power = math.inf
        return max(1, math.floor(min(max(self.base, power), steps_left)))

    def update(self, signals: Signals, plan: Plan) -> Plan:
        left = signals.steps_left
        period = max(1, min(self.warm, left)) if signals.warming_up else self.period(signals.next_lr, left)
        changed = period != plan.period
        self._decision = {"step": signals.step, "lr": signals.next_lr, "period": period} if changed else {}
        return replace(plan, period=period)

    def decision(self) -> dict[str, Any]:
        return self._decision


def decays(run: RunFacts) -> bool:
    """Whether the schedule ever lowers the learning rate during a run."""
    steps = run.steps_per_epoch()
    factors = (run.schedule(step / steps) for step in range(run.steps))
    return any(after < before for before, after in itertools.pairwise(factors))
