"""Synchronous data-parallel training: gradients are exchanged in every step."""

from typing import TYPE_CHECKING

from accordion_bench.sync.base import Sync

if TYPE_CHECKING:
    from accordion_bench.trainer import Trainer


class EveryStep(Sync):
    """x <- optimizer(x, exchange(g_1 .. g_A)), one parameter copy per process."""

    def step(self, trainer: "Trainer", lr: float) -> None:
        axis = trainer.axis
        updates = trainer.exchange(axis.gradients_W, trainer.plan, trainer.step, lr)
        trainer.clock.lap("exposed")
        trainer.signals.add_updates(updates)
        axis.apply(updates)
        for group in trainer.optimizer.param_groups:
            group["lr"] = lr
        trainer.optimizer.step()
        trainer.clock.lap("update")
