"""What a run has reached so far."""

import math
from typing import Any

from torch import Tensor

from accordion_bench.comm.on_device import copy_on_cpu
from accordion_bench.runs.metrics import Metric

KEPT = ("best", "best_epoch", "test_at_best", "to_target", "looks", "files")
SPENT = ("step", "seconds", "modelled_seconds", "payload_bytes")  # what a look tells beside the metric


class Score:
    """The best value of the metric, what it took to reach the target, and the loss of the running epoch.

    Args:
        metric: what the run is judged by.
        target: its value that is to be reached; None = none.
        every: epochs from one look for the target to the next, at most 1.
        loss_sum_W: training loss of this epoch, summed over steps, of each local worker, float64 [W].
        selected_by, tested: columns of the metric, on the split that target and best epoch go by, and on the test
            split.

    Attributes:
        best, best_epoch: value and number of the best epoch.
        test_at_best: what the test split gave then.
        to_target: `seconds` and `payload_bytes` when the target was reached first; empty before.
        looks: what was seen within this epoch, one dict with the metric and what was spent a look.
        files: size and checksum of the weights that were written, by name.
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
        """An epoch has ended with this metrics row; whether it is the best one."""
        value = row[self.selected_by]
        best = self.metric.better(value, self.best)
        if best:
            self.best, self.best_epoch, self.test_at_best = value, row["epoch"], row[self.tested]
        self._note_target(row)
        self.looks = []
        return best

    def due(self, step: int, steps: int) -> bool:
        """Whether it is time for a look within the epoch: there is a target, and it is not reached.

        Args:
            step: how many steps of the epoch are done.
            steps: how many it has; after the last one its row is the look.
        """
        if self.target is None or self.to_target or self.every >= 1:
            return False
        return step < steps and step in {round(k * self.every * steps) for k in range(1, math.ceil(1 / self.every))}

    def look(self, row: dict[str, Any]) -> None:
        """Keep what is seen within an epoch: the metric and what was spent until now."""
        self._note_target(row)
        self.looks.append({key: row[key] for key in (self.selected_by, *SPENT)})

    def _note_target(self, row: dict[str, Any]) -> None:
        if self.target is not None and self.metric.reaches(row[self.selected_by], self.target) and not self.to_target:
            self.to_target = {key: row[key] for key in ("seconds", "payload_bytes")}

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {key: getattr(self, key) for key in KEPT}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        for key in KEPT:
            setattr(self, key, state[key])

    def worker_state(self, row: int) -> dict[str, Any]:
        """The loss of one local worker."""
        return {"loss_sum": copy_on_cpu(self.loss_sum_W[row])}

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Continue from `worker_state()`."""
        self.loss_sum_W[row] += state["loss_sum"].to(self.loss_sum_W.device)
