"""Policies that adapt the averaging period of local methods: QSR and AdaComm, and presets that select a scheme."""

import itertools
import math
from dataclasses import replace
from typing import Any

from accordion_bench.adaptive.policy import Policy
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import Ladder, Plan, Request, RunFacts, Signals, TrainingLoss


@with_options
class Preset(Policy):
    """Policy that only selects a synchronisation scheme; refused where another scheme has been chosen."""

    sync: str = option(default="local_sgd")

    chosen_as = {
        name: Choice(f"one word for sync={name}; its options are sync.*", {"sync": name}, selects={"sync": name})
        for name in ("local_sgd", "post_local_sgd", "slowmo", "diloco")
    }

    drives = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.syncs = (self.sync,)


RAISED = 1 + 1e-9  # compensates a rounding error just below an integer power, as in (0.3 / 0.1)^2


def _qsr_idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Policy.description.idle(cls, options, context)
    if options.get("base_period") is not None:
        yield "sync.period", f"{context.group}.base_period sets the first one"


@with_options
class QSR(Policy):
    """Quadratic synchronisation rule: H = max(H_base, floor((alpha / eta)^exponent)).

    H is at least 1 and at most the number of remaining steps. eta is the learning rate of the next step, scaled by the
    schedule and the number of workers. The policy decides after every averaging, for the round that follows. At a
    learning rate of 0 the workers average only at the end of the run.

    The default `alpha` suits the default run, with learning rates 0.4, 0.04 and 0.004: its periods are 8, 25, and one
    averaging at the end.

    Source: Gu et al., ICLR 2024 (arXiv 2310.14423) and its official code.
    """

    alpha: float = option(
        "learning rate at which the rule gives 1, about half of the peak; higher = longer periods; 0 = always "
        "base_period",
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

    description = replace(Policy.description, idle=_qsr_idle)

    drives = "period"
    required_facts = frozenset({"epochs", "steps_per_epoch", "schedule"})
    when = "exchange"

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

    def length_dependent_decisions(self, epochs: int) -> Any:
        return self._epochs  # the last rounds are shortened at the end of the run

    def period(self, lr: float, steps_left: int) -> int:
        """Return H for a learning rate."""
        if not self.alpha:
            return max(1, min(self.base, steps_left))
        try:
            power = (self.alpha / lr) ** self.exponent * RAISED
        except (ZeroDivisionError, OverflowError):
            power = math.inf
        return max(1, math.floor(min(max(self.base, power), steps_left)))

    def update(self, signals: Signals, plan: Plan) -> Plan:
        left = signals.steps_left
        period = max(1, min(self.warm, left)) if signals.warming_up else self.period(signals.next_lr, left)
        changed = period != plan.period
        self._decision = {"step": signals.step, "lr": signals.next_lr, "period": period} if changed else {}
        return replace(plan, period=period)


def decays(run: RunFacts) -> bool:
    """Return whether the schedule lowers the learning rate at any step of the run."""
    steps = run.steps_per_epoch()
    factors = (run.schedule(step / steps) for step in range(run.steps))
    return any(after < before for before, after in itertools.pairwise(factors))


LOWERED = 1 - 1e-9  # compensates a rounding error just above an integer root


def _adacomm_idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Policy.description.idle(cls, options, context)
    if options.get("initial") is not None:
        yield "sync.period", f"{context.group}.initial sets the first one"


@with_options
class AdaComm(Policy):
    """Shorten the averaging period as the training loss falls: tau_l = ceil(sqrt(eta_0 / eta_l x F_l / F_0) tau_0).

    tau_l is in [1, max_period]. F_l is the mean training loss of all workers over the l-th interval of `every` steps,
    and eta_l the learning rate after it. F_0 and eta_0 belong to the first interval, whose period is tau_0. The policy
    decides at the first averaging after an interval, from the steps up to then. The loss is sent at every averaging (8
    bytes). Synchronous steps before the local ones do not count; the first interval starts after them.

    Where tau_l is not below the last tau, `rule=paper` halves the last tau if the learning rate has not changed. A drop
    of the learning rate increases the root and may raise tau; a warm-up may not. `rule=paddle` is
    ceil(sqrt(eta_0 / eta_l x F_l / F_0 x tau_0)), as in PaddlePaddle's code, and never halves. tau does not change
    where the learning rate is 0, or after a loss that is 0 or not finite.

    `every` must be less than half the number of steps of the run, as known at its start. A policy that enlarges the
    batch, or a late switch to local steps, can leave fewer than two intervals.

    Source: Wang and Joshi 2019 (arXiv 1810.08313); the learning rates in the root, and the halving, as recalled.
    """

    every: int = option("steps between two decisions; shorter = the period falls sooner", default=60, at_least=1)
    initial: int | None = option(
        "period before the first decision; null = sync.period", default=None, at_least=1, instead=16
    )
    max_period: int = option("upper bound on the period after a drop of the learning rate", default=32, at_least=1)
    rule: str = option(
        "paper; paddle: the first period inside the root, no halving", default="paper", choices=("paper", "paddle")
    )

    chosen_as = {
        "adacomm": Choice(
            "the period between averagings falls with the training loss (Wang and Joshi 2019); chooses sync=local_sgd",
            selects={"sync": "local_sgd"},
        )
    }

    description = replace(Policy.description, idle=_adacomm_idle, smoke_options=lambda options, knob: {"every": 1})

    drives = "period"
    keeps = ("first", "last_lr", "loss_sum", "begun", "read")
    required_facts = frozenset({"epochs", "steps_per_epoch", "loss"})
    when = "exchange"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tau_0 = 1
        self.first: tuple[float, float] | None = None  # F_0, eta_0
        self.last_lr = 0.0
        self.loss_sum = 0.0  # over the steps of the current interval
        self.begun = self.read = 0  # steps taken at the start of the interval, and when the loss was last read

    def due(self, exchange: int) -> bool:
        return True  # intervals end after a number of steps, which is not known here

    def needs_at(self, exchange: int) -> frozenset[Request]:
        return frozenset([TrainingLoss()])

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        self.tau_0 = plan.period if self.initial is None else self.initial
        if self.tau_0 > self.max_period:
            rule = f"an integer of at least {self.tau_0}, the first period"
            raise checks.ValueRefused("max_period", rule, self.max_period, self.tau_0)
        if run.steps < 3:
            epochs, every = -(-3 // run.steps_per_epoch()), {} if self.every == 1 else {"adaptive.adacomm.every": 1}
            raise checks.ConfigError(
                f"epochs must be at least {epochs} for adaptive.adacomm, which compares the losses of two intervals, "
                f"got {run.epochs}",
                {"epochs": epochs, **every},
            )
        if 2 * self.every >= run.steps:
            rule = f"less than half the {run.steps} steps of the run, because the losses of two intervals are compared"
            raise checks.ValueRefused("every", rule, self.every, max(1, run.steps // 10))
        return replace(plan, period=self.tau_0)

    def root(self, loss: float, lr: float) -> int:
        """Return tau_l without the halving, at least 1."""
        assert self.first is not None
        loss_0, lr_0 = self.first
        square = lr_0 / lr * loss / loss_0
        value = math.sqrt(square) * self.tau_0 if self.rule == "paper" else math.sqrt(square * self.tau_0)
        return max(1, math.ceil(value * LOWERED))

    def update(self, signals: Signals, plan: Plan) -> Plan:
        steps = signals.step + 1
        if not signals.local:  # a synchronous step; intervals start with the local ones
            self.loss_sum, self.begun, self.read, self._decision = 0.0, steps, steps, {}
            return plan
        self.loss_sum += (math.nan if signals.loss is None else signals.loss) * (steps - self.read)
        self.read = steps
        self._decision = {}
        if steps - self.begun < self.every:
            return plan
        loss = self.loss_sum / (steps - self.begun)
        self.loss_sum, self.begun = 0.0, steps
        period, reason = self.decide(loss, signals.lr, signals.next_lr, plan.period)
        self._decision = {"step": signals.step, "loss": loss, "lr": signals.next_lr, "period": period, "reason": reason}
        return replace(plan, period=period)

    def decide(self, loss: float, lr: float, next_lr: float, period: int) -> tuple[int, str]:
        """Return the period after an interval, and the reason; `next_lr` is eta_l, `lr` that of its last step."""
        if not (math.isfinite(loss) and loss > 0):
            return period, "no loss"
        if not (lr and next_lr):
            return period, "no learning rate"
        if self.first is None:
            self.first, self.last_lr = (loss, lr), lr
            return period, "first loss"
        root = min(self.root(loss, next_lr), self.max_period)
        same, dropped = math.isclose(next_lr, self.last_lr, rel_tol=1e-6), next_lr < self.last_lr
        self.last_lr = next_lr
        if root < period or self.rule == "paddle":
            return root, "root"
        if same:
            return -(-period // 2), "halved"
        return (root, "learning-rate drop") if dropped else (period, "learning-rate rise")
