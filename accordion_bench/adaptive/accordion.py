"""Accordion: weak compression in critical regimes, strong compression elsewhere."""

from typing import Any

from accordion_bench import check
from accordion_bench.adaptive.base import Policy
from accordion_bench.adaptive.critical import STATISTICS, CriticalRegime
from accordion_bench.plan import Ladder, Plan, Run, Signals


class Accordion(Policy):
    """Detector x actuator: the critical-regime test per tensor chooses between two levels of the compressor's knob.

    Args:
        statistic: what is summed over the epoch: `local`: worker 0's gradients (the official code); `mean`: their mean
            over workers (one dense all-reduce per check, in control_bytes); `update`: the decoded updates (free).
        eta, interval, lr_drop_ratio, min_hold: the detector's, see `CriticalRegime`.
        weak: level in critical regimes, e.g. rank 2; null = the compressor's own pair.
        strong: level elsewhere, e.g. rank 1; more compression than `weak`.
    """

    drives = "level"

    def __init__(
        self,
        statistic: str = "local",
        eta: float = 0.5,
        interval: int = 5,
        lr_drop_ratio: float = 0.5,
        min_hold: int | None = None,
        weak: float | None = None,
        strong: float | None = None,
    ) -> None:
        self.statistic = check.choice("statistic", statistic, STATISTICS)
        self.weak, self.strong = weak, strong
        self.detector = CriticalRegime(eta, interval, lr_drop_ratio, min_hold)
        self._decision: dict[str, Any] = {}

    @property
    def signal(self) -> str:
        """The signal that the detector reads."""
        return f"norm_of_sum_{self.statistic}"

    def needs(self, epoch: int) -> frozenset[str]:
        return frozenset([self.signal]) if self.detector.due(epoch) else frozenset()

    def ladder(self, knob: str, pair: tuple[float, float]) -> tuple[float, ...]:
        strong = pair[0] if self.strong is None else self.strong
        weak = pair[1] if self.weak is None else self.weak
        for name, value in (("strong", strong), ("weak", weak)):
            check.number(name, value, above=0, instead=pair[name == "weak"])
        if not strong < weak and pair[0] < weak:
            raise check.ValueRefused("strong", f"a {knob} below weak={check.show(weak)}", strong, pair[0])
        if not strong < weak:
            raise check.ValueRefused("weak", f"a {knob} above strong={check.show(strong)}", weak, pair[1])
        return strong, weak

    def start(self, plan: Plan, ladder: Ladder, run: Run) -> Plan:
        strong, weak = self.ladder(ladder.knob, ladder.pair)
        self._levels = {False: ladder.values.index(strong), True: ladder.values.index(weak)}
        return plan.with_levels(dict.fromkeys(plan.levels, self._levels[True]))

    def update(self, signals: Signals, plan: Plan) -> Plan:
        names = list(plan.levels)
        values = signals.values.get(self.signal)
        norms = None if values is None else [values[name] for name in names]
        before, held = self.detector.saved, self.detector.held(signals.epoch)
        critical = self.detector.update(signals.epoch, norms, signals.lr, signals.next_lr)
        if norms is None and critical is None:
            self._decision = {}
            return plan
        reason = "learning-rate drop" if critical is True else "held" if held else "norm" if before else "first check"
        self._decision = {"names": names, "norm_before": before, "norm": norms, "critical": critical, "reason": reason}
        if critical is None:
            return plan
        flags = [critical] * len(names) if isinstance(critical, bool) else critical
        return plan.with_levels({name: self._levels[flag] for name, flag in zip(names, flags, strict=True)})

    def decision(self) -> dict[str, Any]:
        return self._decision

    def state_dict(self) -> dict[str, Any]:
        return self.detector.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.detector.load_state_dict(state)
