"""Threshold sends all entries above a threshold; DGC, deep gradient compression, applies this to sums of momenta."""

import math
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket
from accordion_bench.codecs.engine import Engine, Momenta, Sampling, Selection
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.selection import kept_entries
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Context, Exchanged, State, zeros_in_state
from accordion_bench.compressors.description import FEEDBACK, TRAVEL, OptimizerPart
from accordion_bench.compressors.sparse import Uneven
from accordion_bench.compressors.wrapper import Wrapper
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import TensorSpec


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Uneven.description.idle(cls, options, context)
    if options.get("threshold") is not None:
        yield "sample_share", "compressor.threshold is set"
        yield "least", "compressor.threshold is set"


def _contraction(compressor: "Threshold", spec: TensorSpec, level: float) -> float | None:
    if compressor.threshold is not None:
        return None
    return math.ceil(compressor.least * kept_entries(spec.numel, level)) / max(1, spec.numel)


@with_options
class Threshold(Uneven):
    """update = mean_w T(g_w), T(x)_i = x_i where |x_i| >= tau, else 0; tau for each worker and tensor.

    tau is estimated from a sample, so that about k = density x numel entries are kept, or given as `threshold`;
    `density` then only bounds the message. It is fp32 values and indices in the smaller code of `index_codes`, of at
    most the `most` x k largest entries, and `payload_bytes` is that bound.

    The sample is evenly spaced, and is shifted by one entry in every step. It is large enough that 32 sampled entries
    are expected above tau; if that takes more than half of all entries, exactly the k largest are sent.

    Source: Strom 2015 (absolute); Lin et al. 2018 (arXiv 1712.01887; sampled).
    """

    density: float = option("approximate share kept; lower density = more compression", default=0.1, above=0, at_most=1)
    threshold: float | None = option(
        "absolute threshold; density then only bounds the message", default=None, above=0, instead=0.001
    )
    sample_share: float = option(
        "share of the entries from which the threshold is estimated", default=0.01, above=0, at_most=1
    )
    least: float = option(
        "the threshold is lowered until this many times density are found; 0 = use the first estimate",
        default=0.8,
        at_least=0,
        at_most=1,
    )
    most: float = option("at most this many times density are sent, the largest ones", default=1.3, at_least=1)

    chosen_as = {
        "threshold": Choice(
            "all entries above a threshold, estimated from a sample (Lin et al. 2018) or absolute (Strom 2015)",
            {"error_feedback": True},
            beside=(*FEEDBACK, "collective", *TRAVEL),
        )
    }

    description = replace(
        Uneven.description,
        display_names={"threshold": "threshold"},
        kernels=("cpu", "cuda"),
        collective_reason="every worker selects different entries, a sum of sparse tensors is not sparse, "
        "and a server must know the size",
        idle=_idle,
        claims=replace(Uneven.description.claims, contraction=_contraction),
    )

    traits = replace(Uneven.traits, knob="density", pair=(0.10, 0.99), min_ndim=2, whole_model=True)

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return super().compresses(spec, level) and (self.threshold is not None or level != 1)

    def most_entries(self, spec: TensorSpec, level: float) -> int:
        """Return the upper bound of the number of entries in a message."""
        return min(spec.numel, int(self.most * kept_entries(spec.numel, level)))

    def choose(self, engine: Engine, bucket: Bucket) -> Selection:
        pairs = list(zip(bucket.specs, bucket.levels, strict=True))
        if self.threshold is not None:
            most = [self.most_entries(spec, level) for spec, level in pairs]
            return engine.above(bucket.rows_W, self.threshold, most)
        sampling = Sampling(self.sample_share, self.least, self.most, offset=bucket.step)
        return engine.about(bucket.rows_W, [kept_entries(spec.numel, level) for spec, level in pairs], sampling)


@with_options
class DGC(Wrapper):
    """u_w <- mu u_w + g_w; v_w <- v_w + u_w; update = mean_w T(v_w); where an entry was sent, u_w = v_w = 0.

    Nesterov: u_w <- mu (u_w + g_w); v_w <- v_w + u_w + g_w. T keeps about density x numel entries of largest magnitude
    (see `Threshold`, with 0.8 k to 1.3 k entries). v_w accumulates the unsent entries, so that error feedback is built
    in: sum of updates + mean v_w = sum of mean velocities, where sending an entry resets its velocity (u_w = 0).

    A tensor that is sent uncompressed (fewer than two dimensions, density 1) sends v_w and keeps u_w: mean_w u_w is
    then the ordinary momentum of the averaged gradient. The optimizer applies weight decay, outside the exchange.

    With `clip`, worker w's gradient over all tensors is first scaled to a norm of at most clip / sqrt(A). In epoch e <
    E = `warmup_epochs` the density is density^((e + 1) / (E + 1)). mu and `nesterov` are the optimizer's.

    Source: Lin, Han, Mao, Wang, Dally 2018 (arXiv 1712.01887).
    """

    inner: Threshold = field(init=False)
    density: float = option(
        "approximate share kept; lower density = more compression", default=0.001, above=0, at_most=1
    )
    momentum: float = option(default=0.9, at_least=0, below=1, shown=False)
    nesterov: bool = option(default=False, shown=False)
    sample_share: float = option(
        "share of the entries from which the threshold is estimated", default=0.01, above=0, at_most=1
    )
    clip: float | None = option(
        "largest norm of the summed gradient; each worker clips to clip / sqrt(workers)",
        default=None,
        above=0,
        instead=1.0,
    )
    warmup_epochs: int = option(
        "epochs in which the density falls from density^(1/5) to density", default=4, at_least=0
    )

    chosen_as = {
        "dgc": Choice("sparse sums of momenta; takes momentum and nesterov from the optimizer (Lin et al. 2018)")
    }

    description = replace(
        Wrapper.description,
        kernels=Threshold.description.kernels,
        collective_reason=Threshold.description.collective_reason,
        no_error_feedback="it already accumulates unsent entries in v, which error feedback would count twice",
    )

    traits = replace(
        Threshold.traits,
        pair=(0.001, 0.1),
        optimizer=OptimizerPart(
            frozenset({"momentum"}), weight_decay_mode="after_decode", takes=frozenset({"momentum"})
        ),
    )

    def __post_init__(self) -> None:
        self.inner = Threshold(self.density, sample_share=self.sample_share)
        super().__post_init__()
        if self.clip is not None:
            self.traits = replace(self.traits, grouping="all")  # because the norm is over all tensors
        self.required_facts = frozenset({"steps_per_epoch"}) if self.warmup_epochs else frozenset()

    def scheduled(self, level: float, epoch: float) -> float:
        if epoch >= self.warmup_epochs:
            return level
        return level ** ((int(epoch) + 1) / (self.warmup_epochs + 1))

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        return zeros_in_state(zeros_in_state({}, "u_W", specs, comm, like), "v_W", specs, comm, like)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        us_W = [state[spec.name]["u_W"] for spec in ctx.specs]
        vs_W = [state[spec.name]["v_W"] for spec in ctx.specs]
        pairs = zip(ctx.specs, ctx.levels, strict=True)
        compressed = [self.compresses(spec, level) for spec, level in pairs]
        self._accumulate(clipped(xs_W, self.clip, comm.workers), us_W, vs_W)
        whole = [i for i, some in enumerate(compressed) if not some]
        # uncompressed tensors are copied, because v is zeroed below
        sent_W = list(vs_W)
        for i, copy_W in zip(whole, copied([vs_W[i] for i in whole]), strict=True):
            sent_W[i] = copy_W
        out = self.inner.exchange(sent_W, ctx, state, comm)
        if whole:
            torch._foreach_zero_([vs_W[i] for i in whole])
        lossy = [i for i, some in enumerate(compressed) if some]
        out.subtract_sent_({i: vs_W[i] for i in lossy})  # zero where sent, up to float32 rounding
        assert out.clear_sent_ is not None
        out.clear_sent_({i: us_W[i] for i in lossy})
        return out

    def _accumulate(self, gs_W: Sequence[Tensor], us_W: list[Tensor], vs_W: list[Tensor]) -> None:
        if us_W:
            engine_for(us_W).add_momenta(Momenta(us_W, gs_W, self.momentum, self.nesterov, vs_W))

    @torch.no_grad()
    def compressor_input(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        """Return v, including this gradient."""
        us_W, vs_W = ([state[spec.name][key].clone() for spec in ctx.specs] for key in ("u_W", "v_W"))
        self._accumulate(clipped(xs_W, self.clip, workers), us_W, vs_W)
        return vs_W


def copied(xs: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors, made in one launch."""
    return list(torch._foreach_mul(list(xs), 1.0)) if xs else []


def clipped(xs_W: Sequence[Tensor], clip: float | None, workers: int) -> Sequence[Tensor]:
    """Return tensors [W, ...] scaled so that each worker's norm over all of them is at most clip / sqrt(workers).

    No communication is needed: gradients of A workers add like independent noise, so that their sum has a norm of about
    `clip`.
    """
    if clip is None or not xs_W:
        return xs_W
    copies_W = copied(xs_W)
    for row in range(len(copies_W[0])):
        own = [copy_W[row] for copy_W in copies_W]
        norm = torch.stack(torch._foreach_norm(own, 2, dtype=torch.float64)).norm()
        scale = (clip / math.sqrt(workers) / norm.clamp_min(1e-150)).clamp_max(1)
        torch._foreach_mul_(own, scale.to(own[0].dtype))
    return copies_W
