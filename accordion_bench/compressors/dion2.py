"""Dion2: orthonormal steps of the largest rows of a momentum that each worker keeps locally.

Tensor suffixes: W local workers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import rates_of
from accordion_bench.codecs.layout import Transfer
from accordion_bench.codecs.orthonormal import PRECISIONS, orthogonalise
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Context, Exchanged, Kept, State, subtract_
from accordion_bench.compressors.description import WhyDense, shorter_messages
from accordion_bench.compressors.dion import OrthonormalSteps
from accordion_bench.compressors.low_rank import batches
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import TensorSpec


class RowStack(NamedTuple):
    """Matrices of one shape that send the same number of rows. Rows are those of the shorter side.

    ids: indices of G tensors.
    k: number of rows sent.
    Ms_W: their momenta [W, G, n, m].
    """

    ids: list[int]
    k: int
    Ms_W: Tensor

    def turned(self, matrices: Tensor) -> Tensor:
        """Transpose matrices [..., n, m] so that the shorter side is first, or back."""
        return matrices.mT if self.Ms_W.shape[2] > self.Ms_W.shape[3] else matrices

    @property
    def rows_W(self) -> Tensor:
        """Rows of the shorter side [W, G, s, l] with s <= l."""
        return self.turned(self.Ms_W)

    def first_W(self) -> Tensor:
        """Return the first payload: norms of the rows [W, G, s], or every row if all are sent."""
        return self.rows_W.clone() if self.k == self.rows_W.shape[2] else self.rows_W.abs().sum(3)

    def chosen(self, mean: Tensor) -> Tensor | None:
        """Return the k rows of largest norm, ascending [G, k], of equal norms the lower row; None = every row."""
        if self.k == self.rows_W.shape[2]:
            return None
        order = mean.sort(dim=1, descending=True, stable=True).indices
        return order[:, : self.k].sort(dim=1).values

    def sent_W(self, own: Tensor) -> Tensor:
        """Return the chosen rows [W, G, k, l]."""
        return self.rows_W.gather(2, own[:, :, None].expand(len(self.rows_W), -1, -1, self.rows_W.shape[3]))

    def spread(self, rows: Tensor, own: Tensor | None) -> Tensor:
        """Return rows [..., G, k, l] as matrices [..., G, n, m] that are 0 elsewhere."""
        if own is not None:
            places = own[:, :, None].expand(rows.shape)
            rows = rows.new_zeros(*rows.shape[:-2], self.rows_W.shape[2], rows.shape[-1]).scatter_(-2, places, rows)
        return self.turned(rows)

    def kept(self, own: Tensor | None, mu: float) -> Tensor:
        """Return the factors of the momenta, [G, s, 1] or [G, 1, s]: mu for rows that were sent, else 1."""
        shape = len(self.ids), self.rows_W.shape[2]
        factors = self.rows_W.new_full(shape, mu if own is None else 1.0)
        return self.turned((factors if own is None else factors.scatter_(1, own, mu))[:, :, None])


def _why_dense(compressor: "Dion2", spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
    if not compressor.takes_step(spec, level) or compressor.rows(spec, level) < min(spec.matrix):
        return None
    return WhyDense(f"density {level:g} sends every row", shorter_messages(compressor))


@with_options
class Dion2(OrthonormalSteps):
    """M_w <- M_w + g_w;  K = the k = ceil(a s) rows i of largest mean_w ||M_w,i||_1;  U = NewtonSchulz(mean_w M_w[K]);
    M_w[K] <- mu M_w[K];  x[K] <- x[K] - eta sqrt(n/m) U, for each hidden matrix [n, m].

    Rows are those of the shorter side, s rows of l entries: columns if n > m. Two all-reduces per step carry s norms
    and k l floats, without indices. M_w contains what was not sent. Given K, mean_w M_w and x evolve like those of one
    worker with the mean gradient. Ties are resolved in favour of the lower row. At density 1 M_w is exchanged
    uncompressed. Embeddings, the output layer and vectors are exchanged dense, and `optimizer=adamw` takes their steps.
    With `own_decay` all rows of the matrices decay by x <- x (1 - eta lambda).

    Source: arXiv 2512.16928 and its official code.
    """

    density: float = option(
        "share of the rows of the shorter side that are sent; lower density = more compression",
        default=0.25,
        above=0,
        at_most=1,
    )
    ns_steps: int = option(
        "iterations of Newton-Schulz; more = closer to orthogonal, but slower", default=5, at_least=1, at_most=99
    )
    ns_precision: str | None = option(
        "dtype of its products: bfloat16; null = that of the gradients", default=None, choices=("bfloat16",)
    )

    chosen_as = {
        "dion2": Choice(
            "orthonormal steps of the largest rows of each worker's momentum, which replaces the optimizer's (Dion2, "
            "2025); optimizer=adamw takes the steps of embeddings, the output layer and vectors",
            {"own_decay": True},
            beside=("start_step",),
            comments={
                "momentum": "factor of the momentum of sent rows; 0 = none",
                "own_decay": "true = weight decay of the matrices is lr_factor times as fast (as the authors do)",
                "start_step": "first step of the method; earlier steps are AdamW's, exchanged dense",
            },
        )
    }

    description = replace(OrthonormalSteps.description, advised_levels=(0.1,), why_dense=_why_dense)

    traits = replace(OrthonormalSteps.traits, knob="density", pair=(0.1, 0.25))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.precision = PRECISIONS[self.ns_precision]

    def rows(self, spec: TensorSpec, level: float) -> int:
        """Return k, the number of rows sent."""
        shorter = min(spec.matrix)
        return min(shorter, max(1, math.ceil(level * shorter - 1e-9)))

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        shorter, k = min(spec.matrix), self.rows(spec, level)
        if k == shorter:
            return [Transfer("all_reduce", 4 * spec.numel)]
        return [Transfer("all_reduce", 4 * shorter), Transfer("all_reduce", 4 * k * max(spec.matrix))]

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        levels = dict(enumerate(ctx.levels))
        ks = {i: self.rows(s, levels[i] or 1) for i, s in enumerate(ctx.specs) if self.takes_step(s, levels[i])}
        dense = [i for i in range(len(xs_W)) if i not in ks]
        momenta_W = {i: state[ctx.specs[i].name]["momentum_W"] for i in ks}
        if ks:
            torch._foreach_add_(list(momenta_W.values()), [xs_W[i] for i in ks])
        every_W = [momenta_W.get(i, x_W) for i, x_W in enumerate(xs_W)]
        stacks = [RowStack(*own) for own in batches(every_W, ctx.specs, [ks.get(i) for i in range(len(xs_W))])]
        firsts_W = [stack.first_W() for stack in stacks]
        means = comm.all_reduce_mean([*firsts_W, *(xs_W[i] for i in dense)])
        chosen = [stack.chosen(mean) for stack, mean in zip(stacks, means, strict=False)]
        pairs = list(zip(stacks, chosen, firsts_W, strict=True))
        sent_W = [first_W if own is None else stack.sent_W(own) for stack, own, first_W in pairs]
        some = [number for number, own in enumerate(chosen) if own is not None]
        sent = means[: len(stacks)]
        for number, mean in zip(some, comm.all_reduce_mean([sent_W[number] for number in some]), strict=True):
            sent[number] = mean

        update: list[Tensor] = list(xs_W)
        for i, mean in zip(dense, means[len(stacks) :], strict=True):
            update[i] = mean
        left: dict[int, Tensor] = {}
        for stack, own, mean in zip(stacks, chosen, sent, strict=True):
            steps, (n, m) = stack.spread(self._orthogonal(mean), own), stack.Ms_W.shape[2:]
            for rate, ids in rates_of(ctx, stack.ids, steps):
                scale = self.lr_factor * math.sqrt(n / m) * rate
                scaled = torch._foreach_mul([steps[stack.ids.index(i)] for i in ids], scale)
                for i, step in zip(ids, scaled, strict=True):
                    update[i] = step.reshape(ctx.specs[i].shape)
            left |= zip(stack.ids, stack.kept(own, self.momentum).unbind(), strict=True)
        if left:
            views_W = [momenta_W[i].view(-1, *ctx.specs[i].matrix) for i in left]
            torch._foreach_mul_(views_W, list(left.values()))

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            subtract_({i: target_W for i, target_W in targets_W.items() if i not in ks}, xs_W)
            for stack, own, rows_W in zip(stacks, chosen, sent_W, strict=True):
                if any(i in targets_W for i in stack.ids):
                    whole_W = torch.stack([stack.spread(row, own) for row in rows_W])
                    for g, i in enumerate(stack.ids):
                        if i in targets_W:
                            targets_W[i].sub_(whole_W[:, g].reshape(targets_W[i].shape))

        return Exchanged(update, subtract_sent_)

    def _orthogonal(self, rows: Tensor) -> Tensor:
        """Apply Newton-Schulz to matrices [G, k, l] of any scale."""
        largest = rows.abs().amax(dim=(1, 2), keepdim=True)
        return orthogonalise(torch.where(largest > 0, rows / largest, rows), self.ns_steps, self.precision)
