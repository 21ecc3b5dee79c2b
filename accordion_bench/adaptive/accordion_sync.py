"""AccordionSync: average often in critical regimes, rarely elsewhere."""

from dataclasses import replace
from typing import Any

from accordion_bench import check
from accordion_bench.adaptive.base import Policy
from accordion_bench.adaptive.critical import STATISTICS, CriticalRegime
from accordion_bench.exchange import WHOLE_MODEL
from accordion_bench.plan import Ladder, Plan, Run, Signals


class AccordionSync(Policy):
    """Accordion's detector on the whole model chooses between two periods of a local method.

    Decided at the ends of epochs, in force from the next averaging on. Our transfer: the paper has no local steps.

    Args:
        statistic: what is summed over the epoch: `local`: worker 0's gradients; `mean`: their mean over workers (one
            dense all-reduce per check, in control_bytes); `update`: the averaged differences of parameters (free).
        eta, interval, lr_drop_ratio, min_hold: the detector's, see `CriticalRegime`.
        weak: steps between averagings in critical regimes, and at the start.
        strong: steps between averagings elsewhere; longer than `weak`.
    """

    drives = "period"

    def __init__(
        self,
        statistic: str = "local",
        eta: float = 0.5,
        interval: int = 5,
        lr_drop_ratio: float = 0.5,
        min_hold: int | None = None,
        weak: int = 2,
        strong: int = 16,
    ) -> None:
        self.statistic = check.choice("statistic", statistic, STATISTICS)
        self.detector = CriticalRegime(eta, interval, lr_drop_ratio, min_hold)
        self.weak = check.integer("weak", weak, at_least=1, instead=2)
        self.strong = check.integer("strong", strong, at_least=1, instead=16)
        if strong <= weak:
            raise check.ValueRefused("strong", f"a period above weak={weak}", strong, 8 * weak)
        self._decision: dict[str, Any] = {}

    @property
    def signal(self) -> str:
        """The signal that the detector reads."""
        return f"norm_of_sum_{self.statistic}"

    def needs(self, epoch: int) -> frozenset[str]:
        return frozenset([self.signal]) if self.detector.due(epoch) else frozenset()

    def start(self, plan: Plan, ladder: Ladder, run: Run) -> Plan:
        return replace(plan, period=self.weak)

    def update(self, signals: Signals, plan: Plan) -> Plan:
        values = signals.values.get(self.signal)
        norms = None if values is None else [values[WHOLE_MODEL]]
        before, held = self.detector.saved, self.detector.held(signals.epoch)
        critical = self.detector.update(signals.epoch, norms, signals.lr, signals.next_lr)
        if norms is None and critical is None:
            self._decision = {}
            return plan
        reason = "learning-rate drop" if critical is True else "held" if held else "norm" if before else "first check"
        if critical is not None:
            plan = replace(plan, period=self.weak if critical is True or critical == [True] else self.strong)
        self._decision = {"norm_before": before, "norm": norms, "period": plan.period, "reason": reason}
        return plan

    def decision(self) -> dict[str, Any]:
        return self._decision

    def state_dict(self) -> dict[str, Any]:
        return self.detector.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.detector.load_state_dict(state)
