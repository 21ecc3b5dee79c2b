"""The progress bar: loss, accuracy, bytes, time left; silent when not on a terminal."""

import sys
import time

from torch import Tensor
from tqdm import tqdm

from accordion_bench.comm.collectives import Comm
from accordion_bench.options.units import human_bytes
from accordion_bench.position import Position
from accordion_bench.runs.metrics import Metric

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

    def step(self, position: Position, loss_sum: Tensor, comm: Comm) -> None:
        """One more step; the figures are refreshed twice a second.

        Args:
            position: where training stands.
            loss_sum: training loss of this epoch, summed over steps and local workers.
            comm: whose ledger tells what was sent.
        """
        if self.bar is None:
            return
        self.bar.total = position.step + position.steps_left  # larger batches mean fewer steps
        self.bar.update()
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REFRESH_SECONDS
            mean = loss_sum.item() / (max(position.step_in_epoch, 1) * comm.local_workers)
            payload = comm.ledger.columns()["payload_bytes"]
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
