"""Synchronous training: every step exchanges gradients."""

from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.replicas import clip_factor
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.exchange.runner import CompletedExchange
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.position import Rate
from accordion_bench.sync.scheme import LEFT, Placed, Sync, SyncContext
from accordion_bench.tensors.same_shape import as_real


@with_options
class EveryStep(Sync):
    """Synchronous step x <- optimizer(x, exchange(g_1 .. g_A)), with one copy of the parameters per process.

    If the compressor looks ahead, worker w computes its gradients at x - lr s_w, in its own parameters.

    A compressor that owns the momentum performs the step of all tensors or of some (`takes_step`). The optimizer then
    gets a zero gradient for these tensors, and still applies weight decay (with its momentum, unless
    `weight_decay_mode` differs).

    In an elastic run the survivors repeat a step whose exchange failed on any worker, from the residuals before it.
    Parameters and optimizer state have not changed at that point. The residual of a lost worker is lost.
    """

    elastic: bool | None = option(
        "whether workers may be lost and others may enter after a step; needs comm=gloo", default=None
    )
    min_workers: int | None = option(LEFT, default=None, at_least=1, instead=2)

    chosen_as = {"every_step": Choice("synchronous data-parallel training")}

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weighs = self.weighs and not self.elastic

    def begin(self, context: SyncContext) -> None:
        super().begin(context)
        self._exchange = self.runner.new_exchange()
        self._updates: list[Tensor] = []  # updates of the current step
        self._taken: list[bool] = []  # for each tensor, whether the update replaces the optimizer's step
        self._zeros: dict[int, Tensor] = {}
        self._looks_ahead = self._exchange.compressor.traits.optimizer.looks_ahead
        if self._looks_ahead:
            self.axis.fork()

    @property
    def exchange(self) -> Exchange:
        return self._exchange

    def gradient_exchange_of_next_step(self) -> Exchange | None:
        return self.exchange

    def exchanges(self) -> list[Placed]:
        return [Placed("gradient", self.exchange, range(self.exchange.comm.local_workers))]

    def resized(self) -> None:
        self.exchange.resized()

    def before_step(self, lr: Rate) -> CompletedExchange | None:
        axis, traits, decay = self.axis, self.exchange.compressor.traits, self.context.weight_decay
        if decay and traits.optimizer.owns and traits.optimizer.weight_decay_mode == "in_gradient":
            for param, gradient_W in zip(axis.params, axis.gradients_W, strict=True):
                gradient_W.add_(as_real(param.detach()), alpha=decay)
        if axis.replicas:
            axis.share()
        completed = self.runner.run([self.exchange], [axis.gradients_W], lr)
        self._updates = completed.updates[0]
        if self.context.clip_mean:
            factor = clip_factor(self._updates, self.context.clip_mean)
            self._updates = list(torch._foreach_mul(self._updates, factor))
        gradients = self._updates
        if traits.optimizer.owns:
            self._taken = self.exchange.steps_taken(self.position.info(lr))
            gradients = self._without_taken(self._updates)
        axis.apply(gradients)
        return completed

    def _without_taken(self, updates: list[Tensor]) -> list[Tensor]:
        """Replace the updates of tensors whose step the compressor performs by zeros, at a fixed address."""
        taken = [i for i, it_is in enumerate(self._taken) if it_is]
        for i in taken:
            if i not in self._zeros or self._zeros[i].stride() != updates[i].stride():
                self._zeros[i] = torch.zeros_like(updates[i])
        if taken:
            torch._foreach_zero_([self._zeros[i] for i in taken])
        return [
            self._zeros[i] if it_is else update
            for i, (update, it_is) in enumerate(zip(updates, self._taken, strict=True))
        ]

    @torch.no_grad()
    def after_step(self, lr: Rate) -> None:
        taken, updates, self._updates = [i for i, it_is in enumerate(self._taken) if it_is], self._updates, []
        if taken:
            rate: Rate = 1.0 if self.exchange.compressor.traits.optimizer.units == "parameter" else lr
            params: list[Tensor] = [as_real(self.axis.params[i]) for i in taken]
            if self.exchange.compressor.traits.optimizer.decay_factor != 1:
                self._decay_at_its_rate(taken, params, lr)
            updates = [updates[i] for i in taken]
            if isinstance(rate, int | float):
                torch._foreach_sub_(params, updates, alpha=rate)
            else:
                torch._foreach_sub_(params, list(torch._foreach_mul(updates, [rate[i] for i in taken])))
        if self._looks_ahead:
            self._look_ahead(lr)
        self.clock.lap("update")

    def _look_ahead(self, lr: Rate) -> None:
        """Set the parameters at which each worker computes its next gradients: x - lr s_w."""
        specs, state = self.axis.specs, self.exchange.state
        rates = [lr] * len(specs) if isinstance(lr, int | float) else lr
        self.axis.restart(self.axis.shared, range(self.comm.local_workers))
        for row in range(self.comm.local_workers):
            steps = torch._foreach_mul([state[spec.name]["ahead_W"][row] for spec in specs], list(rates))
            torch._foreach_sub_(self.axis.values(row), list(steps))

    def _decay_at_its_rate(self, taken: list[int], params: list[Tensor], lr: Rate) -> None:
        """Correct the weight decay of the optimizer: x <- x (1 - f lr lambda) / (1 - lr lambda)."""
        factor = self.exchange.compressor.traits.optimizer.decay_factor
        decays = {id(x): group["weight_decay"] for group in self.inner.common.param_groups for x in group["params"]}
        rates = [lr if isinstance(lr, int | float) else lr[i] for i in taken]
        pairs = zip(rates, (decays[id(self.axis.params[i])] for i in taken), strict=True)
        left = [(1 - factor * rate * decay) / (1 - rate * decay) if rate * decay != 1 else 1.0 for rate, decay in pairs]
        for share in dict.fromkeys(left):
            torch._foreach_mul_([x for x, own in zip(params, left, strict=True) if own == share], share)

    def own(self, row: int) -> dict[str, Any]:
        """Return the parameters at which a worker computes its next gradients, if they are its own."""
        if not self.axis.replicas:
            return {}
        return {"read": {spec.name: x for spec, x in zip(self.axis.specs, self.axis.values(row), strict=True)}}
