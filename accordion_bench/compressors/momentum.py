"""Worker momentum: apply the optimizer's momentum on each worker, before compression."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.engine import Momenta
from accordion_bench.codecs.engines import engine_for
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Context, Exchanged, State, zeros_in_state
from accordion_bench.compressors.wrapper import Wrapper
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import option, with_options
from accordion_bench.plan import TensorSpec


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    if not context.gradients:
        yield "worker_momentum", "no gradients are exchanged"
        yield "weight_decay_mode", "no gradients are exchanged"
    if not options.get("worker_momentum"):
        yield "weight_decay_mode", "compressor.worker_momentum is false"
    if not context.weight_decay:
        yield "weight_decay_mode", "optimizer.weight_decay is 0"


@with_options
class WorkerMomentum(Wrapper):
    """m_w <- mu m_w + g_w; exchange g_w + mu m_w (nesterov) or m_w, instead of g_w.

    The optimizer then applies no momentum. It only applies weight decay, according to `weight_decay_mode`:

    `after_decode`: w <- mu w + lambda x, x <- x - lr (lambda x + mu w), uncompressed, in addition to the exchanged
        step;
    `decoupled`: x <- x - lr lambda x; `in_gradient`: compressed as part of the gradient. mu is the optimizer's.

    Source: Zheng, Huang, Kwok 2019 (arXiv 1905.10936); Bernstein et al. 2018 (Signum).
    """

    momentum: float = option(default=0.9, at_least=0, below=1, shown=False)
    nesterov: bool = option(default=False, shown=False)
    weight_decay_mode: str = option(default="after_decode", choices=("after_decode", "decoupled", "in_gradient"))

    description = replace(Wrapper.description, idle=_idle)

    def __post_init__(self) -> None:
        super().__post_init__()
        optimizer = self.inner.traits.optimizer
        owns, mode = optimizer.owns | {"momentum"}, self.weight_decay_mode
        self.traits = replace(self.inner.traits, optimizer=replace(optimizer, owns=owns, weight_decay_mode=mode))

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        return zeros_in_state(self.inner.init(specs, comm, like), "momentum_W", specs, comm, like)

    @torch.no_grad()
    def compressor_input(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        ms_W = [state[spec.name]["momentum_W"].clone() for spec in ctx.specs]
        sent_W = engine_for(xs_W).add_momenta(Momenta(ms_W, xs_W, self.momentum, self.nesterov)) if ms_W else ms_W
        return self.inner.compressor_input(sent_W, ctx, state, workers)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        ms_W = [state[spec.name]["momentum_W"] for spec in ctx.specs]
        sent_W = engine_for(xs_W).add_momenta(Momenta(ms_W, xs_W, self.momentum, self.nesterov)) if ms_W else ms_W
        return self.inner.exchange(sent_W, ctx, state, comm)
