"""LoCo: error feedback with a moving average of the compression errors, stored in eight bits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.engines import engine_for
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Context, Exchanged, State
from accordion_bench.compressors.error_feedback import ErrorFeedback
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import option, with_options
from accordion_bench.plan import TensorSpec

AGE = "residual_age"  # state key of a bucket's first tensor: number of exchanges so far


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    if options.get("error_feedback") != "loco":
        for key in ("residual_momentum", "residual_reset"):
            yield key, "compressor.error_feedback is not loco"


@with_options
class LoCo(ErrorFeedback):
    """h_w = g_w + e_w; send C(h_w); e_w <- b e_w + (1 - b) (h_w - C(h_w)); e_w <- 0 after every T exchanges.

    The residual varies less from step to step, and is stored in eight bits. The sum of updates differs from the sum of
    mean gradients, because part of the error is never sent. A tensor that is sent uncompressed has no residual.

    Source: Xie et al. 2024 (arXiv 2407.04480), around 4 bits with a scale for each block.
    """

    residual_momentum: float = option(
        "for loco, in [0, 1): weight of the previous residual; 0 = plain error feedback",
        default=0.8,
        at_least=0,
        below=1,
    )
    residual_reset: int = option(
        "for loco: exchanges between resets of the residual; 0 = never", default=1024, at_least=0
    )

    description = replace(ErrorFeedback.description, idle=_idle)
    form = "loco"
    usual_bits = 8

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        state = super().init(specs, comm, like)
        if specs:
            state.setdefault(specs[0].name, {})[AGE] = torch.zeros((), dtype=torch.int64, device=like.device)
        return state

    def feed(
        self, xs_W: Sequence[Tensor], kept_W: Mapping[int, Tensor], ctx: Context, state: State, comm: Comm
    ) -> Exchanged:
        before_W = self.residual_storage.copies(ctx, state, xs_W[0]) if xs_W else {}
        out = super().feed(xs_W, kept_W, ctx, state, comm)
        lost = [e_W for i, e_W in kept_W.items() if self.compresses(ctx.specs[i], ctx.levels[i])]
        before = [e_W for i, e_W in before_W.items() if self.compresses(ctx.specs[i], ctx.levels[i])]
        if lost:
            torch._foreach_lerp_(lost, before, self.residual_momentum)
        self._reset(lost, ctx, state)
        return out

    def _reset(self, kept_W: Sequence[Tensor], ctx: Context, state: State) -> None:
        """Zero the residuals after every T exchanges; a GPU counts on the device, so that the step can be replayed."""
        ages = [state[spec.name][AGE] for spec in ctx.specs if AGE in state.get(spec.name, {})]
        for age in ages:
            age += 1
        if not ages or not kept_W or not self.residual_reset:
            return
        over = ages[0] % self.residual_reset == 0
        if not engine_for(kept_W).checks_input or over:
            torch._foreach_mul_(list(kept_W), (~over).to(kept_W[0].dtype))
