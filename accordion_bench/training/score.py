"""What a run has reached so far."""

from typing import Any

import torch
from torch import Tensor

from accordion_bench.runs.metrics import Metric


class Score:
    """The best value of the metric, what it took to reach the target, and the loss of the running epoch.

    Args:
        metric: what the run is judged by.
        target: its value that is to be reached; None = none.
        device: of the loss.

    Attributes:
        loss_sum: training loss of this epoch, summed over steps and local workers, float64 [].
        to_target: `seconds` and `payload_bytes` when the target was reached first; empty before.
    """

    def __init__(self, metric: Metric, target: float | None, device: torch.device) -> None:
        self.metric, self.target = metric, target
        self.best = metric.worst
        self.to_target: dict[str, float] = {}
        self.loss_sum: Tensor = torch.zeros((), dtype=torch.float64, device=device)

    def note(self, value: float, row: dict[str, Any]) -> bool:
        """An epoch has ended with this value of the metric, and with this metrics row; whether it is the best one."""
        best = self.metric.better(value, self.best)
        if best:
            self.best = value
        if self.target is not None and self.metric.reaches(value, self.target) and not self.to_target:
            self.to_target = {key: row[key] for key in ("seconds", "payload_bytes")}
        return best

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"best": self.best, "to_target": self.to_target}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.best, self.to_target = state["best"], state["to_target"]

    def worker_state(self, row: int) -> dict[str, Any]:
        """The loss, kept by the first local worker."""
        return {"loss_sum": self.loss_sum.clone() if row == 0 else torch.zeros_like(self.loss_sum)}

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Continue from `worker_state()`."""
        self.loss_sum += state["loss_sum"].to(self.loss_sum.device)
