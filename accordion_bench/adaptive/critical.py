"""What all forms of Accordion share: the critical-regime test, and the policy around it."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from accordion_bench.adaptive.base import Policy
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import option, with_options
from accordion_bench.plan import Signals

log = logging.getLogger("accordion_bench")

STATISTICS = ("local", "mean", "update")


class CriticalRegime:
    """The detector, per tensor: critical <=> |s(e-T) - s(e)| >= eta s(e-T), with s(e) = || sum of gradients of e ||.

    A value of None in `critical` means that this epoch decided nothing (no check, nothing to compare with, or held).
    s sums over steps: norms of epochs of different length (the batch has changed) are not compared; the new one is kept
    for the next check.

    Args:
        eta: relative change of the norm from which a regime is critical; lower = critical more often.
        interval: T, epochs between two checks.
        lr_drop_ratio: an epoch that starts with at most this times the learning rate of an instant before is a drop,
            which makes every tensor critical; a steady decay, however steep, is none. 1 = any decrease from epoch to
            epoch (the official code; under a cosine schedule that is every epoch).
        min_hold: epochs after a drop in which checks are skipped, keeping the saved norm; None = T.

    Source: Agarwal et al., MLSys 2021 (arXiv 2010.16248) and its official code.
    """

    def __init__(self, eta: float, interval: int, lr_drop_ratio: float, min_hold: int | None) -> None:
        self.eta, self.interval, self.lr_drop_ratio = eta, interval, lr_drop_ratio
        self.min_hold = interval if min_hold is None else min_hold
        self.saved: list[float] | None = None
        self.steps = 0  # of the epoch of `saved`
        self.last_drop: int | None = None

    def due(self, epoch: int) -> bool:
        """Whether the end of this epoch is a check."""
        return epoch % self.interval == 0

    def held(self, epoch: int) -> bool:
        """Whether a check at the end of this epoch is skipped, because the learning rate has just dropped."""
        return self.last_drop is not None and epoch - self.last_drop < self.min_hold

    def comparable(self, steps: int) -> bool:
        """Whether there is a norm to compare with, of an epoch of as many steps."""
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
        """Decide at the end of an epoch.

        Args:
            epoch: the epoch that ended.
            norms: s(e) per tensor, where a check is due.
            lr: learning rate of this epoch.
            next_lr: learning rate of the next one.
            steps: optimizer steps of this epoch.
            end_lr: learning rate with which this epoch ends; None = `lr`.

        Returns:
            critical or not per tensor; True = all, because the learning rate drops; None = nothing changes.
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
        """The test for one tensor; nothing to divide by, NaN and infinity count as critical."""
        if old == 0 or not (math.isfinite(old) and math.isfinite(new)):
            log.warning("a gradient norm of %s after %s has no relative change; taken as critical", new, old)
            return True
        return abs(old - new) >= self.eta * old

    def state_dict(self) -> dict[str, Any]:
        """The norms of the last check with the steps they are of, and when the learning rate last dropped."""
        return {"saved": self.saved, "steps": self.steps, "last_drop": self.last_drop}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.saved, self.steps, self.last_drop = state["saved"], state["steps"], state["last_drop"]


def _smoke_options(options: Config, knob: str) -> Config:
    return {"interval": 1}


@with_options
class Detecting(Policy):
    """A policy that asks the detector at the ends of epochs; what follows from the answer is the subclass's.

    What is summed is worker 0's gradients (`local`, the official code), their mean over workers (`mean`, one dense
    all-reduce per check, in control_bytes), or the decoded updates (`update`, free). For the others see
    `CriticalRegime`.
    """

    statistic: str = option("whose gradients are summed over the epoch", default="local", choices=STATISTICS)
    eta: float = option("relative change of the norm from which a regime is critical", default=0.5, above=0)
    interval: int = option(
        "epochs between checks; 10 in the paper's 300-epoch runs, 5 in its 90-epoch run", default=5, at_least=1
    )
    lr_drop_ratio: float = option(
        "a learning rate that falls at once to at most this share is a drop; 1 = any decrease",
        default=0.5,
        above=0,
        at_most=1,
    )
    min_hold: int | None = option("epochs after a drop without a check; null = interval", default=None, at_least=0)

    description = replace(Policy.description, smoke_options=_smoke_options)

    detects = True
    intervals = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.signal = f"norm_of_sum_{self.statistic}"
        self.detector = CriticalRegime(self.eta, self.interval, self.lr_drop_ratio, self.min_hold)
        self._decision: dict[str, Any] = {}

    def needs(self, epoch: int) -> frozenset[str]:
        return frozenset([self.signal]) if self.detector.due(epoch) else frozenset()

    def units_change(self) -> None:
        if self.signal == "norm_of_sum_update":
            self.detector.saved = None

    def detect(self, signals: Signals, names: Sequence[str]) -> list[bool] | None:
        """Critical or not, by name; None = nothing changes. The decision notes what was seen, and why."""
        detector = self.detector
        # where no check is due, another policy may have asked for the same signal
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

    def decision(self) -> dict[str, Any]:
        return self._decision

    def state_dict(self) -> dict[str, Any]:
        return self.detector.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.detector.load_state_dict(state)
