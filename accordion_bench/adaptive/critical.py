"""The critical-regime test that all forms of Accordion share."""

import math
from typing import Any

from accordion_bench import check
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
        self.eta = check.number("eta", eta, above=0, instead=0.5)
        self.interval = check.integer("interval", interval, at_least=1, instead=5)
        self.lr_drop_ratio = check.number("lr_drop_ratio", lr_drop_ratio, above=0, at_most=1, instead=0.5)
        if min_hold is not None:
            check.integer("min_hold", min_hold, at_least=0)
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

    def state_dict(self) -> dict[str, Any]:
        """The norms of the last check, and when the learning rate last dropped."""
        return {"saved": self.saved, "last_drop": self.last_drop}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.saved, self.last_drop = state["saved"], state["last_drop"]
