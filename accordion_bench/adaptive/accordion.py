"""Accordion: policies that detect critical regimes and set the compression level, averaging period or batch size."""

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from accordion_bench.adaptive.batch_policies import LR_SCALINGS, most, scaled
from accordion_bench.adaptive.policy import Policy
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import WHOLE_MODEL, Ladder, Plan, RunFacts, Signals

log = logging.getLogger("accordion_bench")

STATISTICS = ("local", "mean", "update")


class CriticalRegime:
    """Detector of critical regimes, per tensor: critical <=> |s(e-T) - s(e)| >= eta s(e-T).

        s(e) = || sum of the gradients of epoch e ||

    s is a sum over steps. Norms of epochs with different numbers of steps (after a change of the batch size) are
    therefore not compared; the new norm is saved for the next check.

    Args:
        eta: relative change of the norm at which a regime counts as critical; lower = critical more often.
        interval: T, epochs between two checks.
        lr_drop_ratio: an epoch whose first learning rate is at most this multiple of the last learning rate of the
            epoch before is a drop, which makes every tensor critical. A steady decay, however steep, is not a drop.
            1 = any decrease from epoch to epoch (the official code; under a cosine schedule, every epoch).
        min_hold: epochs after a drop in which checks are skipped and the saved norm is kept; None = T.

    Source: Agarwal et al., MLSys 2021 (arXiv 2010.16248) and its official code.
    """

    def __init__(self, eta: float, interval: int, lr_drop_ratio: float, min_hold: int | None) -> None:
        self.eta, self.interval, self.lr_drop_ratio = eta, interval, lr_drop_ratio
        self.min_hold = interval if min_hold is None else min_hold
        self.saved: list[float] | None = None
        self.steps = 0  # in the epoch of `saved`
        self.last_drop: int | None = None

    def due(self, epoch: int) -> bool:
        return epoch % self.interval == 0

    def held(self, epoch: int) -> bool:
        """Whether the check at the end of this epoch is skipped because of a recent drop of the learning rate."""
        return self.last_drop is not None and epoch - self.last_drop < self.min_hold

    def comparable(self, steps: int) -> bool:
        """Whether the saved norm belongs to an epoch with the same number of steps."""
        return self.saved is not None and self.steps == steps

    def update(
        self,
        epoch: int,
        norms: list[float] | None,
        lr: float,
        next_lr: float,
        steps: int = 0,
        end_lr: float | None = None,
    ) -> list[bool] | bool | None:
        """Decide at the end of an epoch which tensors are critical.

        Args:
            epoch, steps: index of the epoch that has ended, and its optimizer steps.
            norms: s(e) per tensor; None where no check is due.
            lr, next_lr: learning rates at the start of this epoch and of the next one.
            end_lr: learning rate at the end of this epoch; None = `lr`.

        Returns:
            Whether each tensor is critical; True = all tensors, because the learning rate drops; None = no decision
            (no check, no comparable norm, or held).
        """
        critical = None
        if self.due(epoch) and norms is not None and not self.held(epoch):
            if self.saved is not None and self.comparable(steps):
                critical = [self.changed(old, new) for old, new in zip(self.saved, norms, strict=True)]
            self.saved, self.steps = norms, steps
        if next_lr < lr and next_lr <= self.lr_drop_ratio * (lr if end_lr is None else end_lr):
            self.last_drop = epoch + 1
            return True
        return critical

    def changed(self, old: float, new: float) -> bool:
        """Whether one tensor is critical; an old norm of 0, NaN and infinity count as critical."""
        if old == 0 or not (math.isfinite(old) and math.isfinite(new)):
            log.warning("a gradient norm of %s after %s has no relative change; taken as critical", new, old)
            return True
        return abs(old - new) >= self.eta * old

    def state_dict(self) -> dict[str, Any]:
        return {"saved": self.saved, "steps": self.steps, "last_drop": self.last_drop}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.saved, self.steps, self.last_drop = state["saved"], state["steps"], state["last_drop"]


@with_options
class Detecting(Policy):
    """Base class of policies that run the detector at the ends of epochs; a subclass acts on the result.

    `statistic` selects the sum: gradients of worker 0 (`local`, the official code), their mean over workers (`mean`,
    one dense all-reduce per check, counted in control_bytes), or the decoded updates (`update`, no extra cost). The
    other options are those of `CriticalRegime`.
    """

    statistic: str = option(
        "local (worker 0), mean (all workers), update (decoded): gradients summed over the epoch",
        default="local",
        choices=STATISTICS,
    )
    eta: float = option("relative change of the norm at which a regime is critical", default=0.5, above=0)
    interval: int = option(
        "epochs between checks; 10 in the paper's 300-epoch runs, 5 in its 90-epoch run", default=5, at_least=1
    )
    lr_drop_ratio: float = option(
        "a sudden fall of the learning rate to at most this share is a drop; 1 = any decrease",
        default=0.5,
        above=0,
        at_most=1,
    )
    min_hold: int | None = option("epochs after a drop without a check; null = interval", default=None, at_least=0)

    description = replace(Policy.description, smoke_options=lambda options, knob: {"interval": 1})

    detects = True
    intervals = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.signal = f"norm_of_sum_{self.statistic}"
        self.detector = CriticalRegime(self.eta, self.interval, self.lr_drop_ratio, self.min_hold)

    def needs(self, epoch: int) -> frozenset[str]:
        return frozenset([self.signal]) if self.detector.due(epoch) else frozenset()

    def units_change(self) -> None:
        if self.signal == "norm_of_sum_update":
            self.detector.saved = None

    def detect(self, signals: Signals, names: Sequence[str]) -> list[bool] | None:
        """Return whether each name is critical, None = no change; record the norms and the reason in the decision."""
        detector = self.detector
        # another policy may have requested the same signal in an epoch without a check
        values = signals.values.get(self.signal) if detector.due(signals.epoch) else None
        norms = None if values is None else [values[name] for name in names]
        before, held = detector.saved, detector.held(signals.epoch)
        alike = detector.comparable(signals.epoch_steps)
        rates = signals.lr, signals.next_lr
        found = detector.update(signals.epoch, norms, *rates, signals.epoch_steps, signals.end_lr)
        if norms is None and found is None:
            self._decision = {}
            return None
        if found is True:
            reason = "learning-rate drop"
        elif held:
            reason = "held"
        elif alike:
            reason = "norm"
        elif before is None:
            reason = "first check"
        else:
            reason = "other batch size"
        critical = [found] * len(names) if isinstance(found, bool) else found
        self._decision = {"norm_before": before, "norm": norms, "critical": critical, "reason": reason}
        return critical

    def state_dict(self) -> dict[str, Any]:
        return {**self.detector.state_dict(), **super().state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.detector.load_state_dict(state)
        super().load_state_dict(state)


def _level_smoke_options(options: Config, knob: str) -> Config:
    # a codebook is fitted for every selectable number of bits, and 8 bits take seconds
    return {"interval": 1, **({"strong": 2, "weak": 3} if knob == "bits" else {})}


@with_options
class Accordion(Detecting):
    """Accordion for compression: choose each tensor's level, weak in critical regimes and strong elsewhere."""

    weak: int | float | None = option(
        "level in critical regimes, e.g. rank 2; null = the compressor's weak level", default=None, above=0
    )
    strong: int | float | None = option(
        "level elsewhere, e.g. rank 1; null = the compressor's strong level", default=None, above=0
    )

    chosen_as = {"accordion": Choice("weak compression in critical regimes, strong elsewhere (Agarwal et al. 2021)")}

    description = replace(Detecting.description, smoke_options=_level_smoke_options)

    drives = "level"

    def ladder(self, knob: str, pair: tuple[float, float]) -> tuple[float, ...]:
        strong = pair[0] if self.strong is None else self.strong
        weak = pair[1] if self.weak is None else self.weak
        if not strong < weak and pair[0] < weak:
            raise checks.ValueRefused("strong", f"a {knob} below weak={checks.show(weak)}", strong, pair[0])
        if not strong < weak:
            raise checks.ValueRefused("weak", f"a {knob} above strong={checks.show(strong)}", weak, pair[1])
        return strong, weak

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        strong, weak = self.ladder(ladder.knob, ladder.pair)
        self._levels = {False: ladder.values.index(strong), True: ladder.values.index(weak)}
        return plan.with_levels(dict.fromkeys(plan.levels, self._levels[True]))

    def update(self, signals: Signals, plan: Plan) -> Plan:
        names = list(plan.levels)
        critical = self.detect(signals, names)
        if self._decision:
            self._decision = {"names": names, **self._decision}
        if critical is None:
            return plan
        return plan.with_levels({name: self._levels[flag] for name, flag in zip(names, critical, strict=True)})


def _sync_idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Detecting.description.idle(cls, options, context)
    yield "sync.period", f"{context.group} sets the first one"


@with_options
class AccordionSync(Detecting):
    """Accordion for local methods: one test for the whole model chooses between two periods.

    The new period applies from the next averaging on. With `statistic=update` the updates are the averaged parameter
    differences. The paper has no local steps: this transfer is ours.
    """

    weak: int = option("steps between averagings in critical regimes, and at the start", default=2, at_least=1)
    strong: int = option("steps between averagings elsewhere; more than `weak`", default=16, at_least=1)

    chosen_as = {
        "accordion_sync": Choice(
            "short periods between averagings in critical regimes, long ones elsewhere; chooses sync=local_sgd",
            selects={"sync": "local_sgd"},
            comments={"statistic": "local, mean, update: what is summed over the epoch"},
        )
    }

    description = replace(Detecting.description, idle=_sync_idle)

    drives = "period"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strong <= self.weak:
            raise checks.ValueRefused("strong", f"a period above weak={self.weak}", self.strong, 8 * self.weak)

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        return replace(plan, period=self.weak)

    def update(self, signals: Signals, plan: Plan) -> Plan:
        critical = self.detect(signals, [WHOLE_MODEL])
        if critical is not None:
            plan = replace(plan, period=self.weak if critical[0] else self.strong)
        if self._decision:
            self._decision |= {"critical": None if critical is None else critical[0], "period": plan.period}
        return plan


def _batch_idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Detecting.description.idle(cls, options, context)
    if options.get("large_batch") is not None:
        yield "factor", "large_batch is set"
    if options.get("fixed_switch") is not None:
        for key in ("statistic", "eta", "interval", "lr_drop_ratio", "min_hold"):
            yield key, "fixed_switch is set"


@with_options
class AccordionBatch(Detecting):
    """Accordion for batch sizes: switch to the large batch for good at the first check that is not critical.

    One test for the whole model, with s = sqrt(sum_l s_l^2): critical <=> |s(e-T) - s(e)| >= eta s(e-T). A check at the
    end of epoch e takes effect from epoch e + 1 on. The batch never shrinks: after the switch nothing is measured any
    more, and a drop of the learning rate changes nothing.

    `lr_scaling=linear` (x large / small), the paper's rule as recalled, undoes what a high learning rate has learned.

    Source: Agarwal et al., MLSys 2021 (arXiv 2010.16248).
    """

    factor: int = option(
        "large batch divided by the small one; 512 -> 4096 over all workers in the paper", default=8, at_least=2
    )
    large_batch: int | None = option(
        "large batch in samples per worker and step; null = factor x batch_size", default=None
    )
    lr_scaling: str = option(
        "none, sqrt, linear (the paper's): how the learning rate grows with the batch at the switch",
        default="none",
        choices=LR_SCALINGS,
    )
    fixed_switch: int | None = option(
        "first epoch with the large batch, without detector; 20 in the paper's runs",
        default=None,
        at_least=1,
        instead=20,
    )

    chosen_as = {
        "accordion_batch": Choice("the small batch in critical regimes, a large one afterwards (Agarwal et al. 2021)")
    }

    description = replace(
        Detecting.description, idle=_batch_idle, smoke_options=lambda options, knob: {"interval": 1, "factor": 2}
    )

    drives = "batch"
    keeps = ("switched",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.large_batch is not None:
            try:
                checks.integer("large_batch", self.large_batch, at_least=2)
            except ValueRefused as refused:  # a valid batch depends on the run, which is not known here
                raise ValueRefused("large_batch", f"{{null}} or {refused.rule}", self.large_batch, None) from None
        self.switched = False

    def needs(self, epoch: int) -> frozenset[str]:
        return frozenset() if self.switched or self.fixed_switch is not None else super().needs(epoch)

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        self.small = run.batch_size
        (self.large,) = self.later_batches(run.batch_size)
        self.refuse_sizes(run.batch_size, most(run))
        if self.fixed_switch is not None and self.fixed_switch >= run.epochs > 1:
            rule = f"{{null}}, or an epoch below {run.epochs}, the end of the run"
            raise ValueRefused("fixed_switch", rule, self.fixed_switch, max(run.epochs // 15, 1))
        return plan

    def later_batches(self, first: int) -> Iterable[int]:
        return [self.large_batch or self.factor * first]

    def refuse_sizes(self, small: int, limit: int) -> None:
        """Refuse a large batch that is not above the small one, or above `limit`, the samples per worker and epoch."""
        samples = f"because a worker sees {limit} samples per epoch"
        if limit < 2:
            raise ConfigError(f"adaptive=accordion_batch has nothing to enlarge, {samples}", {"adaptive": "none"})
        if self.large_batch is not None:
            if small >= limit:
                instead = {"batch_size": max(limit // 8, 1)}
                if not max(limit // 8, 1) < self.large_batch <= limit:
                    instead["adaptive.accordion_batch.large_batch"] = limit
                rule = f"below {limit} for adaptive.accordion_batch to enlarge it, {samples}"
                raise ConfigError(f"batch_size must be {rule}, got {small}", instead)
            if not small < self.large_batch <= limit:
                rule = f"above batch_size={small} and at most {limit}, {samples}"
                raise ValueRefused("large_batch", rule, self.large_batch, limit)
        elif 2 * small > limit:
            factor = self.factor if self.factor <= limit else min(8, limit)
            instead = {"batch_size": limit // factor}
            if factor != self.factor:
                instead["adaptive.accordion_batch.factor"] = factor
            rule = f"at most {limit // factor} for adaptive.accordion_batch to enlarge it {factor} times, {samples}"
            raise ConfigError(f"batch_size must be {rule}, got {small}", instead)
        elif self.large > limit:
            rule = f"at most {limit // small} with batch_size={small}, {samples}"
            raise ValueRefused("factor", rule, self.factor, limit // small)

    def begin_epoch(self, epoch: int, exchange: int, plan: Plan) -> None:
        self.switched = plan.batch_size >= self.large

    def update(self, signals: Signals, plan: Plan) -> Plan:
        self._decision = {}
        if plan.batch_size >= self.large or self.critical(signals) is not False:
            return plan
        factor = scaled(self.lr_scaling, self.large / self.small)
        self._decision |= {"batch_size": self.large, "lr_factor": factor}
        return replace(plan, batch_size=self.large, lr_factor=factor)

    def critical(self, signals: Signals) -> bool | None:
        """Return whether the epoch that has ended was critical, None = no decision; record the measurements."""
        if self.fixed_switch is not None:
            if signals.epoch + 1 != self.fixed_switch:
                return None
            self._decision = {"reason": "fixed switch"}
            return False
        found = self.detect(signals, [WHOLE_MODEL])
        critical = None if found is None else found[0]
        if self._decision:
            self._decision["critical"] = critical
        return critical
