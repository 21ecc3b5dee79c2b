"""Accordion for the batch size: small batches in critical regimes, large ones afterwards."""

from dataclasses import replace
from typing import Any

from accordion_bench import check
from accordion_bench.adaptive.base import Policy
from accordion_bench.adaptive.batch import LR_SCALINGS, most, scaled
from accordion_bench.adaptive.critical import STATISTICS, CriticalRegime
from accordion_bench.check import ConfigError, ValueRefused
from accordion_bench.exchange import WHOLE_MODEL
from accordion_bench.plan import Ladder, Plan, Run, Signals


class AccordionBatch(Policy):
    """One critical-regime test for the whole model, s = sqrt(sum_l s_l^2); not critical -> the large batch, for good.

    critical <=> |s(e-T) - s(e)| >= eta s(e-T). A check at the end of epoch e governs from e + 1 on; the batch never
    shrinks, so that after the switch a drop of the learning rate changes nothing.

    Args:
        statistic: what is summed over the epoch, `local`, `mean` or `update`, see `Accordion`.
        eta, interval, lr_drop_ratio, min_hold: the detector's, see `CriticalRegime`.
        factor: how many times larger the large batch is; 8 in the paper (512 -> 4096 over all workers).
        large_batch: samples per worker and step instead of `factor`; null = factor x batch_size.
        lr_scaling: the learning rate at the switch: `linear` (x large / small), `sqrt`, `none`; linear as recalled.
        fixed_switch: the first epoch with the large batch, without a detector (20 in the paper's runs); null = the
            detector decides.

    Source: Agarwal et al., MLSys 2021 (arXiv 2010.16248).
    """

    drives = "batch"

    def __init__(
        self,
        statistic: str = "local",
        eta: float = 0.5,
        interval: int = 5,
        lr_drop_ratio: float = 0.5,
        min_hold: int | None = None,
        factor: int = 8,
        large_batch: int | None = None,
        lr_scaling: str = "linear",
        fixed_switch: int | None = None,
    ) -> None:
        self.signal = f"norm_of_sum_{check.choice('statistic', statistic, STATISTICS)}"
        self.detector = CriticalRegime(eta, interval, lr_drop_ratio, min_hold)
        self.factor = check.integer("factor", factor, at_least=2, instead=8)
        self.large_batch = large_batch
        if large_batch is not None:
            check.integer("large_batch", large_batch, at_least=2)
        self.lr_scaling = check.choice("lr_scaling", lr_scaling, LR_SCALINGS)
        self.fixed_switch = fixed_switch
        if fixed_switch is not None:
            check.integer("fixed_switch", fixed_switch, at_least=1, instead=20)
        self._decision: dict[str, Any] = {}

    def needs(self, epoch: int) -> frozenset[str]:
        return frozenset([self.signal]) if self.fixed_switch is None and self.detector.due(epoch) else frozenset()

    def start(self, plan: Plan, ladder: Ladder, run: Run) -> Plan:
        small, limit = run.batch_size, most(run)
        self.small, self.large = small, self.large_batch or self.factor * small
        samples = f"because a worker sees {run.per_worker} samples per epoch"
        if self.large_batch is not None and not small < self.large_batch <= limit and small < limit:
            rule = f"above batch_size={small} and at most {limit}, {samples}"
            raise ValueRefused("large_batch", rule, self.large_batch, limit)
        if self.large > limit and 2 * small > limit:
            raise ConfigError(
                f"batch_size must be at most {max(limit // self.factor, 1)} for adaptive.accordion_batch to enlarge it "
                f"{self.factor} times, {samples}, got {small}; type batch_size={max(limit // self.factor, 1)}"
            )
        if self.large > limit:
            rule = f"at most {limit // small} with batch_size={small}, {samples}"
            raise ValueRefused("factor", rule, self.factor, limit // small)
        if self.fixed_switch is not None and self.fixed_switch >= run.epochs > 1:
            rule = f"null, or an epoch below {run.epochs}, the end of the run"
            raise ValueRefused("fixed_switch", rule, self.fixed_switch, max(run.epochs // 15, 1))
        return plan

    def update(self, signals: Signals, plan: Plan) -> Plan:
        self._decision = {}
        critical = self.critical(signals)
        if critical is not False or plan.batch_size >= self.large:
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
        values = signals.values.get(self.signal)
        norms = None if values is None else [values[WHOLE_MODEL]]
        before, held = self.detector.saved, self.detector.held(signals.epoch)
        found = self.detector.update(signals.epoch, norms, signals.lr, signals.next_lr)
        critical = found[0] if isinstance(found, list) else found
        if norms is not None or critical is not None:
            reason = "learning-rate drop" if found is True else "held" if held else "norm" if before else "first check"
            self._decision = {"norm_before": before, "norm": norms, "critical": critical, "reason": reason}
        return critical

    def decision(self) -> dict[str, Any]:
        return self._decision

    def state_dict(self) -> dict[str, Any]:
        return self.detector.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.detector.load_state_dict(state)
