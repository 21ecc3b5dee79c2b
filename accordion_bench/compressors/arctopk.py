"""ARC-TopK: send the same rows of a matrix on all workers, selected by a sketch of the mean, with two all-reduces.

Tensor suffixes: W local workers.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import Transfer
from accordion_bench.codecs.selection import kept_at_least
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Compressor, Context, Exchanged, Kept, State, paying_levels, subtract_
from accordion_bench.compressors.description import FEEDBACK, TRAVEL, Traits, WhyDense, shorter_messages
from accordion_bench.compressors.low_rank import batches, keyed_normal
from accordion_bench.compressors.probe import cheaper_than_dense
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.upload import fresh


def _why_dense(compressor: "ARCTopK", spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
    if not compressor.compresses(spec, level) or compressor.pays(spec, level, workers):
        return None
    return WhyDense(
        f"sketch and rows at density {level:g} would be no smaller than the matrix", shorter_messages(compressor)
    )


@with_options
class ARCTopK(Compressor):
    """P = mean_w M_w V / sqrt(r);  I = the k = ceil(density m) rows of P of largest norm;  update[I] = mean_w M_w[I].

    M_w [m, n] is a tensor as a matrix. V [n, r] is drawn from N(0, 1) in each step, the same on all workers. All
    workers send the same rows, so that no indices are sent and both rounds are all-reduces of 4 (m r + k n) bytes in
    total, for any number of workers. Worker w's own contribution is M_w[I]. Ties are resolved in favour of the lower
    row. A matrix for which this is not smaller than the matrix itself is exchanged dense.

    Source: Chen et al. 2025 (arXiv 2510.26709), with the equations of a public port, which exchanges dense gradients
    for the first 1,000 steps (here `start_step`).
    """

    density: float = option(
        "share of the rows of each matrix that is sent; lower density = more compression",
        default=0.2,
        above=0,
        at_most=1,
    )
    sketch: int = option(
        "columns of the sketch that selects the rows; more = better selection, longer messages", default=4, at_least=1
    )

    chosen_as = {
        "arctopk": Choice(
            "whole rows, the same on all workers, selected by a sketch of the mean (ARC-TopK, 2025)",
            {"error_feedback": True},
            beside=(*FEEDBACK, *TRAVEL),
        )
    }

    description = replace(
        Compressor.description,
        display_names={"arctopk": "ARC-TopK"},
        advised_levels=(0.05,),
        why_dense=_why_dense,
    )
    traits = Traits(knob="density", pair=(0.05, 0.2), min_ndim=2, replays=True)

    def rows(self, spec: TensorSpec, level: float) -> int:
        """Return k, the number of rows sent."""
        return kept_at_least(spec.matrix[0], level)

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return super().compresses(spec, level) and spec.numel > 0

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        m, n = spec.matrix
        return [Transfer("all_reduce", 4 * m * self.sketch), Transfer("all_reduce", 4 * self.rows(spec, level) * n)]

    pays = cheaper_than_dense

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        levels = paying_levels(self, ctx, comm.workers)
        kept = [self.rows(spec, levels[i]) if i in levels else None for i, spec in enumerate(ctx.specs)]
        dense = [i for i, k in enumerate(kept) if k is None]
        stacks, engine = batches(xs_W, ctx.specs, kept), engine_for(xs_W)
        sketches = self._drawn(ctx, [[ctx.specs[i] for i in ids] for ids, _, _ in stacks], xs_W)
        Pts_W = engine.multiply([Ms_W for _, _, Ms_W in stacks], sketches)  # (M_w V)^T, [W, G, r, m]
        means = comm.all_reduce_mean([*Pts_W, *(xs_W[i] for i in dense)])
        chosen = [_largest(Pt, k) for Pt, (_, k, _) in zip(means[: len(stacks)], stacks, strict=True)]
        sent_W = [_rows_of(Ms_W, own) for (_, _, Ms_W), own in zip(stacks, chosen, strict=True)]
        rows = comm.all_reduce_mean(sent_W)

        update: list[Tensor] = list(xs_W)
        for i, mean in zip(dense, means[len(stacks) :], strict=True):
            update[i] = mean
        place: dict[int, tuple[int, int]] = {}
        for number, ((ids, _, Ms_W), own, mean) in enumerate(zip(stacks, chosen, rows, strict=True)):
            whole = torch.zeros_like(Ms_W[0]).scatter_(1, _wide(own, mean), mean)
            for g, i in enumerate(ids):
                update[i], place[i] = whole[g].view(ctx.specs[i].shape), (number, g)

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            subtract_({i: target_W for i, target_W in targets_W.items() if i not in place}, xs_W)
            for i in targets_W.keys() & place.keys():
                number, g = place[i]
                matrix_W = targets_W[i].view(len(targets_W[i]), *ctx.specs[i].matrix)
                matrix_W.index_add_(1, chosen[number][g], sent_W[number][:, g], alpha=-1)

        return Exchanged(update, subtract_sent_)

    def _drawn(self, ctx: Context, batches: Sequence[Sequence[TensorSpec]], xs_W: Sequence[Tensor]) -> list[Tensor]:
        """Return V / sqrt(r) of each batch [G, n, r], with one copy to the device for all of them."""
        if not batches:
            return []

        def all_of_them(moment: Context) -> Tensor:
            parts = [
                keyed_normal(moment, "arctopk", spec.name, (spec.matrix[1] * self.sketch,))
                for spec in itertools.chain.from_iterable(batches)
            ]
            return (torch.cat(parts) / math.sqrt(self.sketch)).to(xs_W[0].dtype)

        sizes = [len(specs) * specs[0].matrix[1] * self.sketch for specs in batches]
        parts = fresh(all_of_them, ctx, xs_W[0].device).split(sizes)
        return [part.view(len(specs), -1, self.sketch) for part, specs in zip(parts, batches, strict=True)]


def _largest(Pt: Tensor, k: int) -> Tensor:
    """Return the k columns of P^T [G, r, m] of largest norm, ascending [G, k]; of equal ones the lower index."""
    norms = Pt.double().square().sum(1)
    order = norms.sort(dim=1, descending=True, stable=True).indices
    return order[:, :k].sort(dim=1).values


def _wide(own: Tensor, rows: Tensor) -> Tensor:
    """Expand row indices [G, k] to every entry of rows [G, k, n]."""
    return own[:, :, None].expand(-1, -1, rows.shape[2])


def _rows_of(Ms_W: Tensor, own: Tensor) -> Tensor:
    """Return the rows M_w[I] [W, G, k, n] of matrices [W, G, m, n]."""
    return Ms_W.gather(2, _wide(own, Ms_W[0]).expand(len(Ms_W), -1, -1, -1))
