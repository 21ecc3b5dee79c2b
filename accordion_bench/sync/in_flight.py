"""In flight: an average that travels while the workers go on, from its launch to its use."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from accordion_bench.comm.on_device import copy_on_cpu
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.runner import CompletedExchange, ExchangeRunner


class InFlight:
    """What has been launched and not been used yet: one average at a time.

    Args:
        runner: runs it.

    Attributes:
        updates: what has come of it [...]; [] = there is none, or it has not been waited for.
        landing: waits for it; None = there is nothing to wait for.
    """

    def __init__(self, runner: ExchangeRunner) -> None:
        self.runner, self.clock = runner, runner.comm.clock
        self.updates: list[Tensor] = []
        self.landing: Callable[[], list[Tensor]] | None = None

    def __bool__(self) -> bool:
        return bool(self.updates) or self.landing is not None

    @torch.no_grad()
    def launch(self, exchange: Exchange, moved_W: list[Tensor], late: bool = True) -> CompletedExchange | None:
        """Send differences of parameters; returns the exchange where it was waited for.

        Args:
            exchange: sends them.
            moved_W: [W, ...], in the storage of gradients.
            late: it may travel beside the next step.
        """
        if late and self.runner.may_launch:
            if self.runner.comm.local_workers > 1:  # the next step needs the storage
                moved_W = [x_W.clone() for x_W in moved_W]
            self.landing = self.runner.launch(exchange, moved_W)
            return None
        completed = self.runner.run([exchange], [moved_W])
        (self.updates,) = completed.updates
        return completed

    def land(self) -> None:
        """Wait for what has been launched."""
        if self.landing is not None:
            self.clock.lap("update")
            self.updates, self.landing = self.landing(), None
            self.clock.lap("exposed")

    def take(self) -> list[Tensor]:
        """The updates, to be used now; nothing is in flight any more."""
        self.clock.event("use")
        self.land()
        taken, self.updates = self.updates, []
        return taken

    def drop(self) -> None:
        """Wait for it and forget it."""
        self.land()
        self.updates = []

    def copies(self) -> list[Tensor]:
        """The updates that have come, on the CPU, for a checkpoint."""
        return list(map(copy_on_cpu, self.updates))

    def load(self, updates: Sequence[Tensor]) -> None:
        """Continue with updates of a checkpoint."""
        self.updates = [value.to(self.runner.comm.device, copy=True) for value in updates]
