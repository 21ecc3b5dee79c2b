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


class AccordionBatch(Detecting):
    """One critical-regime test for the whole model, s = sqrt(sum_l s_l^2); not critical -> the large batch, for good.

    critical <=> |s(e-T) - s(e)| >= eta s(e-T). A check at the end of epoch e governs from e + 1 on; the batch never
    shrinks, so that after the switch a drop of the learning rate changes nothing, and nothing is looked at any more.

    Args:
        factor: how many times larger the large batch is; 8 in the paper (512 -> 4096 over all workers).
        large_batch: samples per worker and step instead of `factor`; null = factor x batch_size.
        lr_scaling: the learning rate at the switch: `none`, `sqrt`, or `linear` (x large / small), the paper's as
            recalled, which undoes what a run at a high rate has learned.
        fixed_switch: the first epoch with the large batch, without a detector (20 in the paper's runs); null = the
            detector decides.
        options: the detector's, see `Detecting`.

    Source: Agarwal et al., MLSys 2021 (arXiv 2010.16248).
    """

    description = replace(Detecting.description, idle=_idle, smoke_options=_smoke_options)

    drives = "batch"

    def __init__(
        self,
        factor: int = 8,
        large_batch: int | None = None,
        lr_scaling: str = "none",
        fixed_switch: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.factor = checks.integer("factor", factor, at_least=2, instead=8)
        self.large_batch = large_batch
        if large_batch is not None:
            try:
                checks.integer("large_batch", large_batch, at_least=2)
            except checks.ValueRefused as refused:  # which batch would do, the run alone knows
                rule = f"null or {refused.rule}"
                raise checks.ValueRefused("large_batch", rule, large_batch, None) from None
        self.lr_scaling = checks.choice("lr_scaling", lr_scaling, LR_SCALINGS)
        self.fixed_switch = fixed_switch
        if fixed_switch is not None:
            checks.integer("fixed_switch", fixed_switch, at_least=1, instead=20)
        self.switched = False

    def needs(self, epoch: int) -> frozenset[str]:
        return frozenset() if self.switched or self.fixed_switch is not None else super().needs(epoch)

    def start(self, plan: Plan, ladder: Ladder, run: RunFacts) -> Plan:
        self.small = run.batch_size
        (self.large,) = self.later_batches(run.batch_size)
        self.refuse_sizes(run.batch_size, most(run))
        if self.fixed_switch is not None and self.fixed_switch >= run.epochs > 1:
            rule = f"null, or an epoch below {run.epochs}, the end of the run"
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
            raise ConfigError(f"adaptive=accordion_batch has nothing to enlarge, {samples}; type adaptive=none")
        if self.large_batch is not None:
            if small >= limit:
                instead = f"batch_size={max(limit // 8, 1)}"
                if not max(limit // 8, 1) < self.large_batch <= limit:
                    instead += f" adaptive.accordion_batch.large_batch={limit}"
                rule = f"below {limit} for adaptive.accordion_batch to enlarge it, {samples}"
                raise ConfigError(f"batch_size must be {rule}, got {small}; type {instead}")
            if not small < self.large_batch <= limit:
                rule = f"above batch_size={small} and at most {limit}, {samples}"
                raise ValueRefused("large_batch", rule, self.large_batch, limit)
        elif 2 * small > limit:
            factor = self.factor if self.factor <= limit else min(8, limit)
            instead = f"batch_size={limit // factor}"
            if factor != self.factor:
                instead += f" adaptive.accordion_batch.factor={factor}"
            rule = f"at most {limit // factor} for adaptive.accordion_batch to enlarge it {factor} times, {samples}"
            raise ConfigError(f"batch_size must be {rule}, got {small}; type {instead}")
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
