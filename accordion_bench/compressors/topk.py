"""TopK: the largest entries of each tensor."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors import index_codes
from accordion_bench.compressors.base import Context, Exchanged, State
from accordion_bench.compressors.oneshot import OneShot
from accordion_bench.compressors.selection import kept_entries, top_indices, values_at
from accordion_bench.options import checks
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import TensorSpec


class TopK(OneShot):
    """update = mean_w TopK(g_w): of each tensor the k = density x numel entries of largest magnitude.

    The message is k fp32 values and their indices in the smaller code of `wire`.

    Args:
        density: share of entries kept, in (0, 1]; lower density = more compression.
        count: `at_least_one`: k = max(1, floor(density numel)); `floor`: k may be 0 (Accordion's code).
        reduce: `mean` over workers, or `sum` (Accordion's code: compressed tensors then see A times the learning rate).

    Ties go to the lower index. Source: Aji and Heafield 2017; Stich et al. 2018.
    """

    traits = replace(
        OneShot.traits,
        knob="density",
        pair=(0.10, 0.99),
        min_ndim=2,
        whole_model=True,
        collective_reason="every worker keeps other entries, and a sum of sparse tensors is not sparse",
    )

    def __init__(self, density: float = 0.1, count: str = "at_least_one", reduce: str = "mean") -> None:
        self.density = self.check_level("density", density)
        self.count = checks.choice("count", count, ["at_least_one", "floor"])
        self.reduce = checks.choice("reduce", reduce, ["mean", "sum"])
        self.traits = replace(self.traits, reduces=self.reduce)

    @classmethod
    def idle(cls, options: Config, around: Surroundings) -> Idle:
        yield from super().idle(options, around)
        if around.workers == 1:
            yield "reduce", "one worker's mean is its sum"

    def check_level(self, key: str, value: Any) -> float:
        return checks.number(key, value, above=0, at_most=1, instead=0.1)

    def kept(self, spec: TensorSpec, level: float) -> int:
        """k, the number of entries that one worker sends."""
        return kept_entries(spec.numel, level, 1 if self.count == "at_least_one" else 0)

    def contraction(self, spec: TensorSpec, level: float) -> float:
        return self.kept(spec, level) / max(1, spec.numel)

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return index_codes.sparse_bytes(spec.numel, self.kept(spec, level))

    def paper_floats(self, spec: TensorSpec, level: float | None, workers: int) -> int:
        """2 A floor(K numel): an index counts as one float, and every worker's message."""
        if level is None or spec.ndim < self.traits.min_ndim:
            return spec.numel
        return 2 * workers * kept_entries(spec.numel, level, 0)

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        indices_R = top_indices(x_R, self.kept(spec, level))
        return index_codes.encode_sparse(indices_R, torch.stack(values_at(x_R, list(indices_R))), spec.numel)

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        index_codes.add_sparse_(total_R, message_AR, self.kept(spec, level), alpha)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        out = super().exchange(xs_W, ctx, state, comm)
        if self.reduce == "mean":
            return out
        compressed = [self.compresses(spec, level) for spec, level in zip(ctx.specs, ctx.levels, strict=True)]
        update = [u * comm.workers if c else u for u, c in zip(out.update, compressed, strict=True)]
        return Exchanged(update, out.subtract_sent_)
