"""Exchange: which tensors travel, at which level, in which order; owns the compressor's state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.comm import Comm
from accordion_bench.compressors.base import Compressor, Context, State, dense_bytes
from accordion_bench.plan import Ladder, Plan, TensorSpec

WHOLE_MODEL = "model"


class Exchange:
    """Calls a compressor with what the plan says, once per step, after backward.

    Args:
        compressor: with its wrappers.
        specs: the tensors, in the model's order; the same on every worker.
        ladder: the values behind the plan's levels.
        comm: collectives.
        like: gives type and device of the tensors.
        seed: for keyed draws.
        scope: `tensor`: each tensor by itself. `model`: all tensors as one vector with one level.
        start_step: dense all-reduce before this step.
    """

    def __init__(
        self,
        compressor: Compressor,
        specs: Sequence[TensorSpec],
        ladder: Ladder,
        comm: Comm,
        like: Tensor,
        seed: int = 0,
        scope: str = "tensor",
        start_step: int = 0,
    ) -> None:
        self.compressor, self.specs, self.ladder, self.comm = compressor, list(specs), ladder, comm
        self.seed, self.scope, self.start_step = seed, scope, start_step
        self.sent = sent_specs(specs, scope)
        self.state: State = compressor.init(self.sent, comm, like)
        self.numel = sum(spec.numel for spec in specs)

    def levels(self, plan: Plan, step: int) -> list[float | None]:
        """The knob's value for each sent tensor; None = dense."""
        return [
            self.ladder.values[plan.levels[spec.name]] if spec.name in plan.levels and step >= self.start_step else None
            for spec in self.sent
        ]

    def predicted_bytes(self, plan: Plan, step: int) -> int:
        """Payload that this step will hand to the collectives, from sizes alone."""
        levels = self.levels(plan, step)
        if step < self.start_step:
            return sum(map(dense_bytes, self.sent))
        return sum(
            self.compressor.payload_bytes(spec, level, self.comm.workers)
            for spec, level in zip(self.sent, levels, strict=True)
        )

    @torch.no_grad()
    def __call__(self, xs_W: Sequence[Tensor], plan: Plan, step: int, lr: float) -> list[Tensor]:
        """Exchange tensors [W, ...], one per spec; returns the updates [...]."""
        ctx = Context(step, self.sent, self.levels(plan, step), self.seed, lr)
        if step < self.start_step and not self.compressor.knob:
            return self.comm.all_reduce_mean(xs_W)
        if self.scope == "tensor":
            return self.compressor.exchange(xs_W, ctx, self.state, self.comm).update
        flat_W = torch.cat([x.flatten(1) for x in xs_W], dim=1)
        (flat,) = self.compressor.exchange([flat_W], ctx, self.state, self.comm).update
        parts = flat.split([spec.numel for spec in self.specs])
        return [part.view(spec.shape) for part, spec in zip(parts, self.specs, strict=True)]


def sent_specs(specs: Sequence[TensorSpec], scope: str) -> list[TensorSpec]:
    """What travels as one unit: each tensor, or the whole model as one vector."""
    return list(specs) if scope == "tensor" else [TensorSpec(WHOLE_MODEL, (sum(s.numel for s in specs),))]


def levelled(compressor: Compressor, sent: Sequence[TensorSpec]) -> list[str]:
    """Names of the tensors that get a level: those of enough dimensions."""
    return [spec.name for spec in sent if compressor.knob and spec.ndim >= compressor.min_ndim]
