"""Threshold: all entries above a threshold, however many they are."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.codecs import index_codes
from accordion_bench.codecs.selection import at_least, kept_entries, sampled_top, top_indices, values_at
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.base import Context, Exchanged, State
from accordion_bench.compressors.sampled_on_device import Wanted, about, above, chosen, listed
from accordion_bench.compressors.sparse_on_device import (
    add_in_order_,
    as_bytes,
    exchanged,
    flattened,
    gather_uneven,
    read_counts,
    runs_on_device,
    scattered,
)
from accordion_bench.compressors.uneven import Messages, Uneven
from accordion_bench.options import checks
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import kernels


class Threshold(Uneven):
    """update = mean_w T(g_w), T(x)_i = x_i where |x_i| >= tau, else 0; tau for each worker and tensor.

    tau is estimated from a sample, so that about k = density x numel entries are kept, or given. The message is fp32
    values and indices in the smaller code of `wire`; its length says how many they are. At most `most` x k entries
    are sent, whatever the data: then `payload_bytes` is a bound.

    Args:
        density: share of entries kept, in (0, 1]; lower density = more compression.
        threshold: tau, absolute; density then only bounds the message, to the `most` x k largest. null = estimate it.
        sample_share: share of entries in the sample, evenly spaced, one further in every step; at least so many that 32
            of them are expected above tau. Where that is more than half of them, exactly the k largest are sent.
        least: tau is lowered until this many times k entries are found; 0 = the first estimate does.
        most: of more than this many times k entries exactly the k largest are sent, by magnitude.

    Source: Strom 2015 (absolute); Lin et al. 2018 (arXiv 1712.01887; sampled).
    """

    spelled = {"threshold": "threshold"}
    traits = replace(
        Uneven.traits,
        kernels=("cpu",),
        knob="density",
        pair=(0.10, 0.99),
        min_ndim=2,
        whole_model=True,
        collective_reason="every worker keeps other entries, a sum of sparse tensors is not sparse, "
        "and a server must know the size",
    )

    def __init__(
        self,
        density: float = 0.1,
        threshold: float | None = None,
        sample_share: float = 0.01,
        least: float = 0.8,
        most: float = 1.3,
    ) -> None:
        self.density = self.check_level("density", density)
        self.threshold = None if threshold is None else checks.number("threshold", threshold, above=0, instead=0.001)
        self.sample_share = checks.number("sample_share", sample_share, above=0, at_most=1, instead=0.01)
        self.least = checks.number("least", least, at_least=0, at_most=1, instead=0.8)
        self.most = checks.number("most", most, at_least=1, instead=1.3)

    @classmethod
    def idle(cls, options: Config, around: Surroundings) -> Idle:
        yield from super().idle(options, around)
        if options.get("threshold") is not None:
            yield "sample_share", "compressor.threshold is set"
            yield "least", "compressor.threshold is set"

    def check_level(self, key: str, value: Any) -> float:
        return checks.number(key, value, above=0, at_most=1, instead=0.1)

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return super().compresses(spec, level) and (self.threshold is not None or level != 1)

    def contraction(self, spec: TensorSpec, level: float) -> float | None:
        if self.threshold is not None:
            return None
        return math.ceil(self.least * kept_entries(spec.numel, level)) / max(1, spec.numel)

    def most_entries(self, spec: TensorSpec, level: float) -> int:
        """The largest number of entries that a message may hold."""
        return min(spec.numel, int(self.most * kept_entries(spec.numel, level)))

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return index_codes.sparse_bytes(spec.numel, self.most_entries(spec, level))

    def selected(self, row: Tensor, spec: TensorSpec, level: float, step: int) -> Tensor:
        """Ascending indices of the entries of one row [N] that are sent."""
        if self.threshold is None:
            k = kept_entries(spec.numel, level)
            return sampled_top(row, k, self.sample_share, self.least, self.most, offset=step)
        found, most = at_least(row, self.threshold), self.most_entries(spec, level)
        return found if len(found) <= most else found[top_indices(row[found][None], most)[0]]

    def _wanted(self, spec: TensorSpec, level: float, step: int) -> Wanted:
        """`selected`, for a device."""
        if self.threshold is None:
            k = kept_entries(spec.numel, level)
            return about(spec.numel, k, self.sample_share, self.least, self.most, offset=step)
        return above(self.threshold, self.most_entries(spec, level))

    def _on_device(self, xs_W: Sequence[Tensor], ctx: Context, comm: Comm) -> Exchanged:
        """The same for a whole bucket at once; the host waits once, for how many entries are sent."""
        flat, gathered = flattened(self, ctx, comm.workers)
        if not flat.ids:
            return super().exchange(xs_W, ctx, {}, comm)
        x_W, tensors = flat.rows(xs_W), sum(start < gathered for start in flat.starts)
        wanted = [self._wanted(ctx.specs[i], ctx.levels[i], ctx.step) for i in flat.ids]  # type: ignore[arg-type]
        enough = [listed(n, some) for n, some in zip(flat.sizes, wanted, strict=True)]
        counts_W, found_W = chosen(x_W, flat.parts(enough), wanted)
        own_W, counts_A = read_counts(counts_W, tensors, comm)
        positions_W = [found[: sum(counts)] for found, counts in zip(found_W, own_W, strict=True)]
        values_W = [x.index_select(0, positions).float() for x, positions in zip(x_W, positions_W, strict=True)]

        def summed() -> Tensor:
            kept_W = [sum(counts[:tensors]) for counts in own_W]
            heads_A, positions_A = gather_uneven(
                [as_bytes(values[:kept]) for values, kept in zip(values_W, kept_W, strict=True)],
                [positions[:kept] for positions, kept in zip(positions_W, kept_W, strict=True)],
                flat.starts[:tensors],
                flat.sizes[:tensors],
                counts_A,
                lambda kept: 4 * kept,
                comm,
            )
            values = torch.cat(heads_A).view(torch.float32)
            values_A = values.split([len(positions) for positions in positions_A])
            return add_in_order_(x_W.new_zeros(gathered), positions_A, values_A)

        def own_rows() -> Tensor:
            return scattered(positions_W, values_W, flat.total, x_W.dtype)

        return exchanged(xs_W, flat, gathered, own_rows, summed, comm)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        if runs_on_device(xs_W):
            return self._on_device(xs_W, ctx, comm)
        return super().exchange(xs_W, ctx, state, comm)

    def encode_all(
        self,
        rows_W: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        levels: Sequence[float],
        ctx: Context,
        workers: Sequence[int],
        purpose: str = "",
    ) -> Messages:
        if not kernels.usable(rows_W):
            return super().encode_all(rows_W, specs, levels, ctx, workers, purpose)
        from accordion_bench.compressors import sparse_rows
        from accordion_bench.tensors.kernels.rows import Rows

        rows, pairs = Rows(rows_W), list(zip(specs, levels, strict=True)) * len(rows_W[0])
        if self.threshold is None:
            k = np.array([kept_entries(spec.numel, level) for spec, level in pairs])
            chosen = sparse_rows.choose_about(rows, k, self.sample_share, self.least, self.most, offset=ctx.step)
        else:
            most = np.array([self.most_entries(spec, level) for spec, level in pairs])
            chosen = sparse_rows.choose_above(rows, self.threshold, most)
        return sparse_rows.encode_chosen(rows, chosen, len(specs))

    def entries(self, message: Tensor, spec: TensorSpec) -> int:
        return index_codes.sparse_count(spec.numel, len(message))

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> list[Tensor]:
        indices_R = [self.selected(row, spec, level, ctx.step) for row in x_R]
        values = values_at(x_R, indices_R)
        pairs = zip(indices_R, values, strict=True)
        return [index_codes.encode_sparse(indices[None], value[None], spec.numel)[0] for indices, value in pairs]

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        index_codes.add_sparse_(total_R, message_AR, index_codes.sparse_count(spec.numel, message_AR.shape[2]), alpha)
