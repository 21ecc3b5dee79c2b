"""Accordion for the batch size: small batches in critical regimes, large ones afterwards."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from accordion_bench.adaptive.batch_limits import LR_SCALINGS, most, scaled
from accordion_bench.adaptive.critical import Detecting
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import WHOLE_MODEL, Ladder, Plan, RunFacts, Signals


def _idle(cls: Any, options: Config, context: Surroundings) -> Idle:
    yield from Detecting.description.idle(cls, options, context)
    if options.get("large_batch") is not None:
        yield "factor", "large_batch is set"
    if options.get("fixed_switch") is not None:
        for key in ("statistic", "eta", "interval", "lr_drop_ratio", "min_hold"):
            yield key, "fixed_switch is set"


def _smoke_options(options: Config, knob: str) -> Config:
    return Detecting.description.smoke_options(options, knob) | {"factor": 2}


@with_options
class AccordionBatch(Detecting):
    """One critical-regime test for the whole model, s = sqrt(sum_l s_l^2); not critical -> the large batch, for good.

    critical <=> |s(e-T) - s(e)| >= eta s(e-T). A check at the end of epoch e governs from e + 1 on; the batch never
    shrinks, so that after the switch a drop of the learning rate changes nothing, and nothing is looked at any more.

    A `linear` rate (x large / small) is the paper's as recalled; it undoes what a run at a high rate has learned.

    Source: Agarwal et al., MLSys 2021 (arXiv 2010.16248).
    """

    factor: int = option(
        "how many times larger the large batch is; 512 -> 4096 over all workers in the paper", default=8, at_least=2
    )
    large_batch: int | None = option("samples per worker and step instead; null = factor x batch_size", default=None)
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

    description = replace(Detecting.description, idle=_idle, smoke_options=_smoke_options)

    drives = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.large_batch is not None:
            try:
                checks.integer("large_batch", self.large_batch, at_least=2)
            except ValueRefused as refused:  # which batch would do, the run alone knows
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
        """Refuse a large batch that is not larger, or that no worker could fill.

        Args:
            small: batch at the start.
            limit: samples that a worker sees per epoch.

        Raises:
            ConfigError: with values that fit together.
        """
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
        """Whether the epoch that has ended was critical; None = this epoch decides nothing. Notes what it saw."""
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

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "switched": self.switched}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.switched = state["switched"]
