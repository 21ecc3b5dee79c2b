"""Synchronous data-parallel training: gradients are exchanged in every step."""

from typing import TYPE_CHECKING

import torch

from accordion_bench.sync.base import Sync

if TYPE_CHECKING:
    from accordion_bench.trainer import Trainer


class EveryStep(Sync):
    """x <- optimizer(x, exchange(g_1 .. g_A)), one parameter copy per process.

    A compressor that owns the momentum takes the step itself; the optimizer is then left with a zero gradient, from
    which it still decays the weights (with its momentum, unless `weight_decay_mode` says otherwise).
    """

    def step(self, trainer: "Trainer", lr: float) -> None:
        axis, compressor = trainer.axis, trainer.exchange.compressor
        decay = trainer.cfg["optimizer"].get("weight_decay", 0)
        if decay and compressor.owns and compressor.weight_decay_mode == "in_gradient":
            for param, gradient_W in zip(axis.params, axis.gradients_W, strict=True):
                gradient_W.add_(param.detach(), alpha=decay)
        updates = trainer.exchange(axis.gradients_W, trainer.plan, trainer.step, lr, trainer.now)
        trainer.clock.lap("exposed")
        trainer.signals.add_updates(updates)
        for group in trainer.optimizer.param_groups:
            group["lr"] = lr
        if not compressor.owns:
            axis.apply(updates)
            trainer.optimizer.step()
        else:
            axis.apply([torch.zeros_like(update) for update in updates])
            trainer.optimizer.step()
            with torch.no_grad():
                torch._foreach_sub_(list(axis.params), updates, alpha=1 if compressor.units == "parameter" else lr)
        trainer.clock.lap("update")
