"""RandomK: exchange randomly drawn entries, the same on all workers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Context, Target
from accordion_bench.codecs.engine import Engine
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import Transfer
from accordion_bench.codecs.selection import kept_entries
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Compressor, Exchanged, Kept, State, subtract_
from accordion_bench.compressors.description import FEEDBACK, TRAVEL, OptimizerPart, Traits
from accordion_bench.compressors.gathered import target_like
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import keyed_rng


def keys_of(bucket: Bucket) -> list[int]:
    """Return the keys of the draws of a bucket's tensors, equal on all workers."""
    return [keyed_rng.key(bucket.seed, "randomk", spec.name, bucket.step) for spec in bucket.specs]


def _contraction(compressor: "RandomK", spec: TensorSpec, level: float) -> float | None:
    return None if compressor.traits.unbiased else compressor.kept(spec, level) / max(1, spec.numel)


def _variance(compressor: "RandomK", x_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor | None:
    return (compressor.factor(spec, level) - 1) * x_R.double().square().sum(1) if compressor.traits.unbiased else None


@with_options
class RandomK(Compressor):
    """update = c mean_w g_w on k = max(1, floor(density n)) coordinates of each tensor, drawn anew in every step.

    All workers draw the same coordinates by a keyed permutation, so that only values are sent, in one all-reduce. With
    error feedback c = 1: a projection, with contraction k/n. Without error feedback c = n/k: E[update] = mean_w g_w,
    with variance (n/k - 1) ||g_w||^2. c is not an option: with error feedback c = n/k would make residuals grow, and
    without it c = 1 would shrink every step by k/n.

    Source: Stich et al. 2018 (arXiv 1809.07599); unbiased: Wangni et al. 2018 (arXiv 1710.09854).
    """

    density: float = option("share kept; lower density = more compression", default=0.1, above=0, at_most=1)
    error_feedback: bool = option(default=True, shown=False)  # whether this compressor is wrapped in error feedback

    chosen_as = {
        "randomk": Choice(
            "entries drawn at random, the same on all workers (Stich et al. 2018)",
            {"error_feedback": True},
            beside=(*FEEDBACK, *TRAVEL),
            comments={
                "error_feedback": "true, ef21, loco; false: entries times numel / kept, so that the update is unbiased"
            },
        )
    }

    description = replace(
        Compressor.description,
        kernels=("cpu", "cuda"),
        claims=replace(Compressor.description.claims, draws="shared", contraction=_contraction, variance=_variance),
    )

    traits = Traits(
        knob="density",
        pair=(0.10, 0.99),
        min_ndim=2,
        whole_model=True,
        optimizer=OptimizerPart(takes=frozenset({"error_feedback"})),
        replays=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.traits = replace(self.traits, unbiased=not self.error_feedback)

    def kept(self, spec: TensorSpec, level: float) -> int:
        """Return k, the number of entries exchanged."""
        return kept_entries(spec.numel, level)

    def factor(self, spec: TensorSpec, level: float) -> float:
        """Return c, the factor of an exchanged entry."""
        return spec.numel / max(1, self.kept(spec, level)) if self.traits.unbiased else 1.0

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        return [Transfer("all_reduce", 4 * self.kept(spec, level))]

    def places(self, engine: Engine, bucket: Bucket, device: torch.device) -> Any:
        """Return the coordinates drawn in this step, in the same order on all workers and devices."""
        counts = [self.kept(spec, level) for spec, level in zip(bucket.specs, bucket.levels, strict=True)]
        return engine.places(keys_of, counts, bucket, device)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        lossy = [i for i, spec in enumerate(ctx.specs) if self.compresses(spec, ctx.levels[i])]
        bucket = Bucket.of(xs_W, ctx, lossy, comm.local)
        pairs = list(zip(bucket.specs, bucket.levels, strict=True))
        factors = [self.factor(spec, level) for spec, level in pairs]
        engine = engine_for(bucket.rows_W)
        places = self.places(engine, bucket, comm.device) if lossy else None
        sent_W = list(xs_W)
        if places is not None:
            for i, values_W in zip(lossy, engine.take(bucket.rows_W, places), strict=True):
                sent_W[i] = values_W
        update = comm.all_reduce_mean(sent_W)
        if places is not None:
            target = target_like([xs_W[i][0] for i in lossy], False)
            engine.put(target, [update[i][None] for i in lossy], places, factors)
            for i, mean in zip(lossy, target.rows_R, strict=True):
                update[i] = mean.view(xs_W[i][0].shape)

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            subtract_({i: target_W for i, target_W in targets_W.items() if i not in lossy}, xs_W)
            if ks := [k for k, i in enumerate(lossy) if i in targets_W]:
                part = bucket.take(ks)
                own = places if part is bucket else self.places(engine, part, comm.device)
                rows_W = [targets_W[lossy[k]].view(comm.local_workers, -1) for k in ks]
                engine.put(Target(rows_W, -1.0), [sent_W[lossy[k]] for k in ks], own, [factors[k] for k in ks])

        return Exchanged(update, subtract_sent_)
