"""Synchronous data-parallel training: gradients are exchanged in every step."""

from typing import TYPE_CHECKING, Any

import torch

from accordion_bench.exchange.exchange import Exchange
from accordion_bench.sync.base import Placed, Sync
from accordion_bench.tensors.clip import clip_factor

if TYPE_CHECKING:
    from accordion_bench.training.trainer import Trainer


class EveryStep(Sync):
    """x <- optimizer(x, exchange(g_1 .. g_A)), one parameter copy per process.

    A compressor that owns the momentum takes the step itself; the optimizer is then left with a zero gradient, from
    which it still decays the weights (with its momentum, unless `weight_decay_mode` says otherwise).
    """

    def begin(self, trainer: "Trainer") -> None:
        self._exchange, self._trainer = trainer.new_exchange(), trainer

    def state_dict(self) -> dict[str, Any]:
        scale = self._trainer.loss_scale
        return {"loss_scale": scale.state_dict()} if scale else {}

    def load_state_dict(self, trainer: "Trainer", state: dict[str, Any]) -> None:
        if trainer.loss_scale:
            trainer.loss_scale.load_state_dict(state["loss_scale"])

    @property
    def exchange(self) -> Exchange:
        return self._exchange

    def gradients_go_to(self, trainer: "Trainer") -> Exchange | None:
        return self.exchange

    def exchanges(self) -> list[Placed]:
        return [Placed("gradient", self.exchange, range(self.exchange.comm.local_workers))]

    def step(self, trainer: "Trainer", lr: float) -> None:
        axis, traits = trainer.axis, self.exchange.compressor.traits
        decay = trainer.cfg["optimizer"].get("weight_decay", 0)
        if decay and traits.owns and traits.weight_decay_mode == "in_gradient":
            for param, gradient_W in zip(axis.params, axis.gradients_W, strict=True):
                gradient_W.add_(param.detach(), alpha=decay)
        (updates,) = trainer.exchanged([self.exchange], [axis.gradients_W], lr)
        if trainer.cfg.get("clip_at") == "after" and trainer.cfg["clip_norm"]:
            updates = list(torch._foreach_mul(updates, clip_factor(updates, trainer.cfg["clip_norm"])))
        for group in trainer.optimizer.param_groups:
            group["lr"] = lr
        if not traits.owns:
            axis.apply(updates)
            trainer.optimizer.step()
        else:
            axis.apply([torch.zeros_like(update) for update in updates])
            trainer.optimizer.step()
            with torch.no_grad():
                torch._foreach_sub_(list(axis.params), updates, alpha=1 if traits.units == "parameter" else lr)
        trainer.clock.lap("update")
