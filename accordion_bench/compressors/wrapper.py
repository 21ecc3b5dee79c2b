"""Wrapper: base class of compressors around another compressor; the optimizer's momentum on each worker."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.engine import Momenta
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import Transfer
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Compressor, Context, Exchanged, Kept, Saved, State, zeros_in_state
from accordion_bench.compressors.description import Claims, dense_reason, paper_floats, with_claims
from accordion_bench.compressors.probe import buckets_of, probe_input
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import option, with_options
from accordion_bench.plan import TensorSpec


def _of_inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a wrapper that calls a function of its inner compressor."""
    return lambda compressor, *arguments: function(compressor.inner, *arguments)


@with_options
class Wrapper(Compressor):
    """A compressor around another one; everything that it does not override is delegated to the inner compressor.

    A subclass that declares traits keeps them, and its description. A subclass that creates its inner compressor does
    so before `super().__post_init__()`.
    """

    inner: Compressor

    description = replace(
        Compressor.description,
        paper_floats=_of_inner(paper_floats),
        why_dense=_of_inner(dense_reason),
        probe_input=_of_inner(probe_input),
        buckets_of=_of_inner(buckets_of),
        claims=Claims(
            contraction=_of_inner(lambda inner, *of: inner.description.claims.contraction(inner, *of)),
            variance=_of_inner(lambda inner, *of: inner.description.claims.variance(inner, *of)),
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        claims = self.inner.description.claims
        own = with_claims(type(self).description, draws=claims.draws, sum_eps=claims.sum_eps)
        if type(self).traits is Compressor.traits:
            self.traits = self.inner.traits
            inherited = ("knob_with", "collective_reason", "no_error_feedback", "kernels")
            own = replace(own, **{key: getattr(self.inner.description, key) for key in inherited})
        self.description = own

    @property
    def level(self) -> float | None:
        return self.inner.level

    def check_level(self, key: str, value: Any) -> float:
        return self.inner.check_level(key, value)

    def scheduled(self, level: float, epoch: float) -> float:
        return self.inner.scheduled(level, epoch)

    def codebook(self, bits: int) -> tuple[float, ...] | None:
        return self.inner.codebook(bits)

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return self.inner.compresses(spec, level)

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        return self.inner.init(specs, comm, like)

    def redistributed_state(self, kept_A: Sequence[Saved], worker: int, workers: int) -> dict[str, dict[str, Tensor]]:
        return self.inner.redistributed_state(kept_A, worker, workers)

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        return self.inner.transfers(spec, level, workers, kept)

    def pays(self, spec: TensorSpec, level: float, workers: int) -> bool:
        return self.inner.pays(spec, level, workers)

    def compressor_input(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        return self.inner.compressor_input(xs_W, ctx, state, workers)


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
