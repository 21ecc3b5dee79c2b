"""The progress bar: loss, accuracy, bytes, time left; silent when not on a terminal."""

import sys
import time
from typing import TYPE_CHECKING

from tqdm import tqdm

from accordion_bench.options.units import human_bytes
from accordion_bench.runs.metrics import Metric

if TYPE_CHECKING:
    from accordion_bench.training.trainer import Trainer

REFRESH_SECONDS = 0.5


class Progress:
    """A tqdm bar over optimizer steps on the leader's terminal.

    Args:
        leader: whether this process tells anything.
    """

    def __init__(self, leader: bool) -> None:
        self.shown = leader and sys.stderr.isatty()
        self.bar: tqdm | None = None
        self.evaluated: tuple[Metric, float] | None = None
        self._next = 0.0

    def begin(self, total: int, done: int) -> None:
        """Open the bar."""
        if self.shown:
            self.bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, leave=False)

    def step(self, trainer: "Trainer") -> None:
        """One more step; the figures are refreshed twice a second."""
        if self.bar is None:
            return
        self.bar.total = trainer.step + trainer.steps_left  # larger batches mean fewer steps
        self.bar.update()
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REFRESH_SECONDS
            mean = trainer.loss_sum.item() / (max(trainer.step_in_epoch, 1) * trainer.comm.local_workers)
            payload = trainer.comm.ledger.columns()["payload_bytes"]
            figures = {"loss": f"{mean:.3f}", "sent": human_bytes(payload)}
            if self.evaluated:
                metric, value = self.evaluated
                figures[metric.name] = metric.show(value)
            self.bar.set_postfix(figures)

    def epoch(self, metric: Metric, value: float) -> None:
        """Note the newest evaluation."""
        self.evaluated = metric, value

    def close(self) -> None:
        """Remove the bar."""
        if self.bar is not None:
            self.bar.close()
