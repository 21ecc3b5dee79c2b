"""RandomK: entries drawn at random, the same on all workers."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.selection import kept_entries
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.base import Compressor, Context, Exchanged, State, dense_bytes, subtract_
from accordion_bench.compressors.flat_bucket import FlatBucket
from accordion_bench.compressors.sparse_on_device import runs_on_device
from accordion_bench.compressors.traits import Traits
from accordion_bench.options import checks
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import keyed_rng, large_pages
from accordion_bench.tensors.distinct import draw_distinct
from accordion_bench.tensors.upload import upload


class RandomK(Compressor):
    """update = c mean_w g_w on k = max(1, floor(density n)) coordinates of each tensor, drawn anew in every step.

    All workers draw the same ones, so that values alone travel, in one all-reduce. With error feedback c = 1: a
    projection, of contraction k/n. Without, c = n/k: E[update] = mean_w g_w, of variance (n/k - 1) ||g_w||^2. A message
    n/k times too long would make residuals grow, one without it shrinks every step by k/n: so c is no option.

    Args:
        density: share of entries kept, in (0, 1]; lower density = more compression.
        error_feedback: whether error feedback is wrapped around it.

    Source: Stich et al. 2018 (arXiv 1809.07599); unbiased: Wangni et al. 2018 (arXiv 1710.09854).
    """

    traits = Traits(
        knob="density", pair=(0.10, 0.99), min_ndim=2, whole_model=True, takes=frozenset({"error_feedback"})
    )
    draws = "shared"

    def __init__(self, density: float = 0.1, error_feedback: bool = True) -> None:
        self.density = self.check_level("density", density)
        self.traits = replace(self.traits, unbiased=not checks.boolean("error_feedback", error_feedback))

    def check_level(self, key: str, value: Any) -> float:
        return checks.number(key, value, above=0, at_most=1, instead=0.1)

    def kept(self, spec: TensorSpec, level: float) -> int:
        """k, the number of entries that are exchanged."""
        return kept_entries(spec.numel, level)

    def factor(self, spec: TensorSpec, level: float) -> float:
        """c, by which an exchanged entry is multiplied."""
        return spec.numel / max(1, self.kept(spec, level)) if self.traits.unbiased else 1.0

    def contraction(self, spec: TensorSpec, level: float) -> float | None:
        return None if self.traits.unbiased else self.kept(spec, level) / max(1, spec.numel)

    def variance(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor | None:
        return (self.factor(spec, level) - 1) * x_R.double().square().sum(1) if self.traits.unbiased else None

    def payload_bytes(self, spec: TensorSpec, level: float | None, workers: int) -> int:
        if level is None or not self.compresses(spec, level):
            return dense_bytes(spec)
        return 4 * self.kept(spec, level)

    def drawn(self, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
        """The ascending indices [k] of this step, equal on all workers and devices."""
        generator = keyed_rng.generator(ctx.seed, "randomk", spec.name, ctx.step)
        return draw_distinct(spec.numel, self.kept(spec, level), generator)

    def _on_device(self, xs_W: Sequence[Tensor], flat: FlatBucket, ctx: Context, comm: Comm) -> Exchanged:
        """The same for a whole bucket at once; what was drawn goes up while nobody waits."""
        levels = [ctx.levels[i] for i in flat.ids]
        pairs = [(ctx.specs[i], level) for i, level in zip(flat.ids, levels, strict=True) if level is not None]
        drawn = [self.drawn(spec, level, ctx) for spec, level in pairs]
        factors = [self.factor(spec, level) for spec, level in pairs]
        kept = [len(index) for index in drawn]
        places = torch.cat([index + start for index, start in zip(drawn, flat.starts, strict=True)])
        positions, x_W = upload(places, xs_W[0].device), flat.rows(xs_W)
        values_W = x_W.index_select(1, positions)
        whole = [i for i in range(len(xs_W)) if i not in set(flat.ids)]
        values, *means = comm.all_reduce_mean([values_W, *(xs_W[i] for i in whole)])
        update: list[Tensor] = list(xs_W)
        for i, mean in zip(whole, means, strict=True):
            update[i] = mean

        def scaled(values: Tensor) -> Tensor:
            """Values [..., K], each tensor's times its factor; in place."""
            if any(factor != 1 for factor in factors):
                torch._foreach_mul_(list(values.split(kept, dim=-1)), factors)
            return values

        full = x_W.new_zeros(flat.total).index_copy_(0, positions, scaled(values))
        for i, part in zip(flat.ids, full.split(flat.sizes), strict=True):
            update[i] = part.view(ctx.specs[i].shape)

        @functools.cache  # for several who subtract
        def own_rows() -> Tensor:
            return torch.zeros_like(x_W).index_copy_(1, positions, scaled(values_W.clone()))

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            subtract_({i: target_W for i, target_W in targets_W.items() if i in whole}, xs_W)
            if set(flat.ids) & targets_W.keys():
                flat.add_(targets_W, own_rows(), -1.0)

        return Exchanged(update, subtract_sent_)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        lossy = [i for i, spec in enumerate(ctx.specs) if self.compresses(spec, ctx.levels[i])]
        if lossy and runs_on_device(xs_W):
            return self._on_device(xs_W, FlatBucket(lossy, ctx), ctx, comm)
        indices: dict[int, Tensor] = {}
        factors: dict[int, float] = {}
        for i, (spec, level) in enumerate(zip(ctx.specs, ctx.levels, strict=True)):
            if level is not None and self.compresses(spec, level):
                indices[i], factors[i] = self.drawn(spec, level, ctx).to(comm.device), self.factor(spec, level)
        sent_W = [x_W.flatten(1)[:, indices[i]] if i in indices else x_W for i, x_W in enumerate(xs_W)]
        update = comm.all_reduce_mean(sent_W)
        for i, index in indices.items():
            full = large_pages.zeros(1, ctx.specs[i].numel, comm.device, update[i].dtype)[0]
            update[i] = full.index_copy_(0, index, update[i] * factors[i]).view(ctx.specs[i].shape)

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            for i, target_W in targets_W.items():
                if i in indices:
                    target_W.view(len(target_W), -1).index_add_(1, indices[i], sent_W[i], alpha=-factors[i])
                else:
                    target_W.sub_(sent_W[i])

        return Exchanged(update, subtract_sent_)
