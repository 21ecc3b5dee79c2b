"""Best metric, target and training loss of a run so far."""

import math
from typing import Any

from torch import Tensor

from accordion_bench.comm.on_device import copy_on_cpu
from accordion_bench.runs.metrics import Metric

KEPT = ("best", "best_epoch", "test_at_best", "to_target", "looks", "files")
SPENT = ("step", "seconds", "modelled_seconds", "payload_bytes")  # columns of a look besides the metric


class Score:
    """Best value of the metric, cost of reaching the target, and training loss of the current epoch.

    A look is an evaluation within an epoch, to find out when the target is reached.

    Args:
        metric: evaluation metric of the run.
        target: value of the metric to reach; None = no target.
        every: interval between looks in epochs, at most 1.
        loss_sum_W: training loss of this epoch, summed over steps, of each local worker, float64 [W].
        selected_by, tested: its columns on the split that decides on target and best epoch, and on the test split.

    Attributes:
        best, best_epoch: value and number of the best epoch.
        test_at_best: metric on the test split in the best epoch.
        to_target: `seconds` and `payload_bytes` when the target was first reached; empty before.
        looks: one dict per look in this epoch, with the metric and the columns of SPENT.
        files: size and checksum of the weight files, by name.
    """

    def __init__(
        self,
        metric: Metric,
        target: float | None,
        every: float,
        loss_sum_W: Tensor,
        selected_by: str,
        tested: str,
    ) -> None:
        self.metric, self.target, self.every = metric, target, every
        self.selected_by, self.tested = selected_by, tested
        self.best = metric.worst
        self.best_epoch: int | None = None
        self.test_at_best: float | None = None
        self.to_target: dict[str, float] = {}
        self.looks: list[dict[str, Any]] = []
        self.files: dict[str, tuple[int, int]] = {}
        self.loss_sum_W = loss_sum_W

    def note(self, row: dict[str, Any]) -> bool:
        """Record the metrics row of an epoch and return whether it is the best epoch so far."""
        value = row[self.selected_by]
        best = self.metric.better(value, self.best)
        if best:
            self.best, self.best_epoch, self.test_at_best = value, row["epoch"], row[self.tested]
        self._note_target(row)
        self.looks = []
        return best

    def due(self, step: int, steps: int) -> bool:
        """Whether a look is due within the epoch, because a target exists that is not reached.

        Args:
            step: number of steps done in the epoch.
            steps: number of steps of the epoch; the row of the epoch is used after the last one.
        """
        if self.target is None or self.to_target or self.every >= 1:
            return False
        return step < steps and step in {round(k * self.every * steps) for k in range(1, math.ceil(1 / self.every))}

    def look(self, row: dict[str, Any]) -> None:
        """Record the metric and the cost so far of a look."""
        self._note_target(row)
        self.looks.append({key: row[key] for key in (self.selected_by, *SPENT)})

    def _note_target(self, row: dict[str, Any]) -> None:
        if self.target is not None and self.metric.reaches(row[self.selected_by], self.target) and not self.to_target:
            self.to_target = {key: row[key] for key in ("seconds", "payload_bytes")}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
        return {key: getattr(self, key) for key in KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore from `state_dict()`."""
        for key in KEPT:
            setattr(self, key, state[key])

    def worker_state(self, row: int) -> dict[str, Any]:
        """Return the loss sum of one local worker."""
        return {"loss_sum": copy_on_cpu(self.loss_sum_W[row])}

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Restore from `worker_state()`."""
        self.loss_sum_W[row] += state["loss_sum"].to(self.loss_sum_W.device)
