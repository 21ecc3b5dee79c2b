"""Accordion: weak compression in critical regimes, strong compression elsewhere."""

import math
from typing import Any

from accordion_bench import check
from accordion_bench.adaptive.base import Policy
from accordion_bench.plan import Ladder, Plan, Signals
from accordion_bench.record import log

STATISTICS = ("local", "mean", "update")


class CriticalRegime:
    """The detector, per tensor: critical <=> |s(e-T) - s(e)| >= eta s(e-T), with s(e) = || sum of gradients of e ||.

    A value of None in `critical` means that this epoch decided nothing (no check, no history yet, or held).

    Args:
        eta: relative change of the norm from which a regime is critical; lower = critical more often.
        interval: T, epochs between two checks.
        lr_drop_ratio: a next learning rate of at most this times the current one is a drop; a drop makes every tensor
            critical. 1 = any decrease (the official code; under a cosine schedule that is every epoch).
        min_hold: epochs after a drop in which checks are skipped, keeping the saved norm; None = T.

    Source: Agarwal et al., MLSys 2021 (arXiv 2010.16248) and its official code.
    """

    def __init__(self, eta: float, interval: int, lr_drop_ratio: float, min_hold: int | None) -> None:
        self.eta, self.interval, self.lr_drop_ratio = eta, interval, lr_drop_ratio
        self.min_hold = interval if min_hold is None else min_hold
        self.saved: list[float] | None = None
        self.last_drop: int | None = None

    def due(self, epoch: int) -> bool:
        """Whether the end of this epoch is a check."""
        return epoch % self.interval == 0

    def held(self, epoch: int) -> bool:
        """Whether a check at the end of this epoch is skipped, because the learning rate has just dropped."""
        return self.last_drop is not None and epoch - self.last_drop < self.min_hold

    def update(self, epoch: int, norms: list[float] | None, lr: float, next_lr: float) -> list[bool] | bool | None:
        """Decide at the end of an epoch.

        Args:
            epoch: the epoch that ended.
            norms: s(e) per tensor, where a check is due.
            lr: learning rate of this epoch.
            next_lr: learning rate of the next one.

        Returns:
            critical or not per tensor; True = all, because the learning rate drops; None = nothing changes.
        """
        critical = None
        if self.due(epoch) and norms is not None and not self.held(epoch):
            if self.saved is not None:
                critical = [self.changed(old, new) for old, new in zip(self.saved, norms, strict=True)]
            self.saved = norms
        if next_lr < lr and next_lr <= self.lr_drop_ratio * lr:
            self.last_drop = epoch + 1
            return True
        return critical

    def changed(self, old: float, new: float) -> bool:
        """The test for one tensor; nothing to divide by, NaN and infinity count as critical."""
        if old == 0 or not (math.isfinite(old) and math.isfinite(new)):
            log.warning("a gradient norm of %s after %s has no relative change; taken as critical", new, old)
            return True
        return abs(old - new) >= self.eta * old


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
        check.number("eta", eta, above=0, instead=0.5)
        check.integer("interval", interval, at_least=1, instead=5)
        check.number("lr_drop_ratio", lr_drop_ratio, above=0, at_most=1, instead=0.5)
        if min_hold is not None:
            check.integer("min_hold", min_hold, at_least=0)
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

    def start(self, plan: Plan, ladder: Ladder) -> Plan:
        self._ladder = ladder
        strong, weak = self.ladder(ladder.knob, (ladder.values[0], ladder.values[-1]))
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
        return {"saved": self.detector.saved, "last_drop": self.detector.last_drop}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.detector.saved, self.detector.last_drop = state["saved"], state["last_drop"]
