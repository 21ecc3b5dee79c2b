"""Dion: orthonormal low-rank steps from a momentum that each worker keeps locally.

Tensor suffixes: W local workers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import rates_of
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import Transfer
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import (
    Compressor,
    Context,
    Exchanged,
    Kept,
    State,
    subtract_,
    zeros_in_state,
)
from accordion_bench.compressors.description import OptimizerPart, Traits, WhyDense, shorter_messages
from accordion_bench.compressors.low_rank import batches, keep_queries, keyed_normal, of_batches, together, with_columns
from accordion_bench.compressors.probe import Probed, probe_exchanged
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import NEAREST, Choice, option, with_options
from accordion_bench.plan import TensorSpec


class MatrixKind(NamedTuple):
    """Properties that the matrices of a batch share.

    rank: r.
    whole: whether their momenta are exchanged uncompressed, because factors would not be smaller.
    """

    rank: int
    whole: bool


class Stack(NamedTuple):
    """Matrices of one shape and kind.

    ids: indices of G tensors.
    kind: of all of them.
    Ms_W: their momenta [W, G, n, m].
    """

    ids: list[int]
    kind: MatrixKind
    Ms_W: Tensor

    @property
    def wide(self) -> bool:
        """Whether the second side is longer than the first."""
        return self.Ms_W.shape[2] < self.Ms_W.shape[3]

    def tall(self, matrices: Tensor) -> Tensor:
        """Transpose matrices [..., n, m] to [..., k, l] with k >= l, or back."""
        return matrices.mT if self.wide else matrices

    def sides(self, tall: Tensor, short: Tensor) -> tuple[Tensor, Tensor]:
        """Return factors L [..., n, r] and R [..., r, m] of the original matrices, from [..., k, r] and [..., r, l]."""
        return (short.mT, tall.mT) if self.wide else (tall, short)


def _why_dense(compressor: "Dion", spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
    kind = compressor.kind(spec, level)
    if kind is None or not kind.whole:
        return None
    return WhyDense(f"factors of rank {level:g} would be no smaller than the matrix", shorter_messages(compressor))


def _probe_input(compressor: "Dion", ps_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> Probed:
    """Probe with momenta of zero, because `ps_W` already includes the momenta."""
    pairs = list(zip(ctx.specs, ps_W, strict=True))
    empty = {spec.name: {**state.get(spec.name, {}), "momentum_W": torch.zeros_like(x_W)} for spec, x_W in pairs}
    return probe_exchanged(compressor, ps_W, ctx, empty, workers)


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from Compressor.description.idle(cls, options, context)
    if not context.weight_decay:
        yield "own_decay", "optimizer.weight_decay is 0"


@with_options
class OrthonormalSteps(Compressor):
    """Base class of methods that take the steps of hidden matrices; `optimizer=adamw` takes those of other tensors."""

    momentum: float = option("0 = none", default=0.95, at_least=0, below=1)
    lr_factor: float = option("learning rate of the matrices as a multiple of optimizer.lr", default=10.0, above=0)
    own_decay: bool = option(
        "true = weight decay of the matrices is lr_factor times as fast (as the authors do)", default=False
    )

    description = replace(
        Compressor.description,
        no_error_feedback="its momentum already accumulates what was not sent",
        requires={"optimizer": "adamw"},
        idle=_idle,
        probe_input=_probe_input,
    )

    traits = Traits(
        min_ndim=2,
        tables=False,
        reduces="other",
        optimizer=OptimizerPart(frozenset({"momentum", "lr"}), "parameter", shares_steps=True, fits=("AdamW",)),
        replays=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        factor = self.lr_factor if self.own_decay else 1.0
        self.traits = replace(self.traits, optimizer=replace(self.traits.optimizer, decay_factor=factor))

    def takes_step(self, spec: TensorSpec, level: float | None) -> bool:
        return level is not None and spec.ndim >= self.traits.min_ndim and min(spec.matrix) >= 2

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return self.takes_step(spec, level)

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        taken = [spec for spec in specs if self.takes_step(spec, 1) and not spec.table]
        return zeros_in_state({}, "momentum_W", taken, comm, like)

    def compressor_input(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        """Return M + g for the matrices."""
        found = zip(xs_W, ctx.specs, ctx.levels, strict=True)
        return [state[s.name]["momentum_W"] + x_W if self.takes_step(s, level) else x_W for x_W, s, level in found]


@with_options
class Dion(OrthonormalSteps):
    """M_w <- M_w + g_w;  P = orth(mean_w M_w Q);  R = mean_w M_w^T P;  M_w <- M_w - (1 - mu) P R^T;
    Q <- R / norms of its columns;  x <- x - eta sqrt(n/m) P Q^T, for each hidden matrix [n, m].

    P is the factor of the longer side: a wide matrix is transposed. M_w is both momentum and residual of its worker,
    and mean_w M_w evolves like that of one worker with the mean gradient. Two all-reduces per step carry r n and r m
    floats, as in PowerSGD. If that is not less than n m, M_w is exchanged uncompressed for the same step. A matrix with
    M = 0 does not move. Each of r directions of a square matrix moves by eta, regardless of the gradient's size.

    Embeddings, the output layer and vectors are exchanged dense, and `optimizer=adamw` takes their steps. It also
    applies weight decay to the matrices, x <- x (1 - lr lambda), unless `own_decay` is set.

    Source: Ahn, Xu, Abreu, Langford 2025 (arXiv 2504.05295).
    """

    rank: int = option("lower rank = more compression", default=16, at_least=1, instead=NEAREST)

    chosen_as = {
        "dion": Choice(
            "orthonormal low-rank steps from each worker's momentum, which replaces the optimizer's (Ahn et al. 2025); "
            "optimizer=adamw takes the steps of embeddings, the output layer and vectors",
            beside=("start_step",),
            comments={"start_step": "first step of the method; earlier steps are AdamW's, exchanged dense"},
        )
    }

    description = replace(OrthonormalSteps.description, advised_levels=(4, 16, 64), why_dense=_why_dense)

    traits = replace(OrthonormalSteps.traits, knob="rank", pair=(4, 16))

    def kind(self, spec: TensorSpec, level: float | None) -> MatrixKind | None:
        """Return how a matrix is exchanged; None = the optimizer takes its step."""
        if level is None or not self.takes_step(spec, level):
            return None
        rank = min(*spec.matrix, int(level))
        return MatrixKind(rank, rank * sum(spec.matrix) >= spec.numel)

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        kind = self.kind(spec, level)
        assert kind is not None
        sides = [spec.numel] if kind.whole else [kind.rank * side for side in spec.matrix]
        return [Transfer("all_reduce", 4 * side) for side in sides]

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        kinds = [self.kind(spec, level) for spec, level in zip(ctx.specs, ctx.levels, strict=True)]
        dense = [i for i, kind in enumerate(kinds) if kind is None]
        own = {i: state[ctx.specs[i].name] for i, kind in enumerate(kinds) if kind is not None}
        momenta_W = {i: entries["momentum_W"] for i, entries in own.items()}
        if momenta_W:
            torch._foreach_add_(list(momenta_W.values()), [xs_W[i] for i in momenta_W])
        every_W = [momenta_W.get(i, x_W) for i, x_W in enumerate(xs_W)]
        stacks = [Stack(*found) for found in batches(every_W, ctx.specs, kinds)]
        olds = together(  # [G, l, r]
            [[self._query(ctx, i, stack.kind.rank, own[i].get("q"), xs_W[i]) for i in stack.ids] for stack in stacks]
        )
        engine = engine_for(xs_W)
        Qs = engine.orthonormalise(olds)  # only the span of leading columns matters; this improves the conditioning

        # (M_w Q)^T [W, G, r, k], or M_w
        sent = [number for number, stack in enumerate(stacks) if not stack.kind.whole]
        firsts_W = [stack.Ms_W for stack in stacks]
        talls_W = [stack.tall(stack.Ms_W) for stack in stacks]
        found_W = engine.multiply([talls_W[number] for number in sent], [Qs[number] for number in sent])
        for number, product_W in zip(sent, found_W, strict=True):
            firsts_W[number] = product_W
        means = comm.all_reduce_mean([*firsts_W, *(xs_W[i] for i in dense)])
        of_stacks, of_dense = means[: len(stacks)], means[len(stacks) :]
        products = [  # mean_w M_w Q [G, k, r]
            stack.tall(mean) @ Q if stack.kind.whole else mean.mT
            for stack, mean, Q in zip(stacks, of_stacks, Qs, strict=True)
        ]
        alive = [product.abs().amax(dim=(-2, -1), keepdim=True) > 0 for product in products]
        Ps = [torch.where(some, P, 0) for some, P in zip(alive, engine.orthonormalise(products), strict=True)]

        Rts_W = engine.multiply([tall_W.mT for tall_W in talls_W], Ps)  # [W, G, r, l]
        reduced = iter(
            comm.all_reduce_mean([Rt_W for stack, Rt_W in zip(stacks, Rts_W, strict=True) if not stack.kind.whole])
        )
        Rts = [
            P.mT @ stack.tall(mean) if stack.kind.whole else next(reduced)
            for stack, mean, P in zip(stacks, of_stacks, Ps, strict=True)
        ]

        update: list[Tensor] = list(xs_W)
        for i, mean in zip(dense, of_dense, strict=True):
            update[i] = mean
        Qts = [unit_rows(Rt) for Rt in Rts]
        kept = engine.replace_degenerate([Qt.mT for Qt in Qts], olds)
        directions = engine.products(Ps, Qts)  # [G, k, l]
        for stack, direction, P, new in zip(stacks, directions, Ps, kept, strict=True):
            n, m = stack.Ms_W.shape[2:]
            steps = dict(zip(stack.ids, stack.tall(direction).unbind(), strict=True))
            for rate, ids in rates_of(ctx, stack.ids, P):
                scaled = torch._foreach_mul([steps[i] for i in ids], self.lr_factor * math.sqrt(n / m) * rate)
                for i, step in zip(ids, scaled, strict=True):
                    update[i] = step.reshape(ctx.specs[i].shape)
            keep_queries(state, {ctx.specs[i].name: new[g] for g, i in enumerate(stack.ids)})

        def subtract_products_(targets_W: Mapping[int, Tensor], Rts_W: Sequence[Tensor], alpha: float = 1.0) -> None:
            """Compute target [W, ...] -= alpha P R_w^T, by index of the tensor."""
            own_W = of_batches(targets_W, [stack.ids for stack in stacks])
            Ps_W = [P.expand(comm.local_workers, -1, -1, -1) for P in Ps]
            pairs_W = [stack.sides(P_W, Rt_W) for stack, P_W, Rt_W in zip(stacks, Ps_W, Rts_W, strict=True)]
            engine.subtract_products(own_W, [left for left, _ in pairs_W], [right for _, right in pairs_W], alpha)

        subtract_products_(momenta_W, [Rt.expand(comm.local_workers, -1, -1, -1) for Rt in Rts], 1 - self.momentum)

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            """Subtract the part of the worker's momentum that the factors contain."""
            subtract_products_(targets_W, Rts_W)
            subtract_({i: targets_W[i] for i in dense if i in targets_W}, xs_W)

        return Exchanged(update, subtract_sent_)

    def _query(self, ctx: Context, i: int, rank: int, kept: Tensor | None, like: Tensor) -> Tensor:
        """Return Q [l, r] of the shorter side l: the previous Q adjusted to the rank, or a keyed draw from N(0, 1)."""
        spec = ctx.specs[i]

        def draw(columns: int) -> Tensor:
            return keyed_normal(ctx, "dion", spec.name, (min(spec.matrix), columns), rank)

        return with_columns(kept, rank, draw, like)


def unit_rows(rows: Tensor) -> Tensor:
    """Return rows [G, r, l] scaled to norm 1; in each matrix, rows below sqrt(eps) of the longest row are set to zero,
    because they may consist of rounding errors.
    """
    number = torch.finfo(rows.dtype)
    scaled = rows / rows.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(number.tiny)  # so that squares are in range
    norms = scaled.norm(dim=-1, keepdim=True)
    longest = norms.amax(dim=-2, keepdim=True)
    return torch.where(norms > math.sqrt(number.eps) * longest, scaled / norms.clamp_min(number.tiny), 0)
