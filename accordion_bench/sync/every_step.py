"""Synchronous SGD: every step exchanges gradients."""

import torch
from torch import Tensor

from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.runner import CompletedExchange
from accordion_bench.sync.base import Placed, Sync, SyncContext
from accordion_bench.tensors.clip import clip_factor


class EveryStep(Sync):
    """x <- optimizer(x, exchange(g_1 .. g_A)), one parameter copy per process.

    A compressor that owns the momentum takes the step itself; the optimizer is then left with a zero gradient, from
    which it still decays the weights (with its momentum, unless `weight_decay_mode` says otherwise).
    """

    def begin(self, context: SyncContext) -> None:
        super().begin(context)
        self._exchange = self.runner.new_exchange()

    @property
    def exchange(self) -> Exchange:
        return self._exchange

    def gradients_go_to(self) -> Exchange | None:
        return self.exchange

    def exchanges(self) -> list[Placed]:
        return [Placed("gradient", self.exchange, range(self.exchange.comm.local_workers))]

    def step(self, lr: float) -> CompletedExchange:
        axis, traits, decay = self.axis, self.exchange.compressor.traits, self.context.weight_decay
        if decay and traits.owns and traits.weight_decay_mode == "in_gradient":
            for param, gradient_W in zip(axis.params, axis.gradients_W, strict=True):
                gradient_W.add_(param.detach(), alpha=decay)
        completed = self.runner.run([self.exchange], [axis.gradients_W], lr)
        updates: list[Tensor] = completed.updates[0]
        if self.context.clip_mean:
            updates = list(torch._foreach_mul(updates, clip_factor(updates, self.context.clip_mean)))
        for group in self.inner.common.param_groups:
            group["lr"] = lr
        if not traits.owns:
            axis.apply(updates)
            self.inner.common.step()
        else:
            axis.apply([torch.zeros_like(update) for update in updates])
            self.inner.common.step()
            with torch.no_grad():
                torch._foreach_sub_(list(axis.params), updates, alpha=1 if traits.units == "parameter" else lr)
        self.clock.lap("update")
        return completed
