"""PowerSGD and ACP-SGD: low-rank compression by one power iteration per step, or by half of one.

Tensor suffixes: W local workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.engine import Engine
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import Transfer
from accordion_bench.codecs.orthonormal import fixed_numbers
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Context, Exchanged, Kept, State, subtract_
from accordion_bench.compressors.description import FEEDBACK, TRAVEL, Traits
from accordion_bench.compressors.low_rank import (
    LowRank,
    LowRankInput,
    batches,
    keep_queries,
    keyed_normal,
    of_batches,
    together,
    with_columns,
)
from accordion_bench.options.component import Idle, RunContext
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import Choice, option, with_options
from accordion_bench.plan import TensorSpec


def _idle(cls: Any, options: Config, context: RunContext) -> Idle:
    yield from LowRank.description.idle(cls, options, context)
    if not context.steered_by:
        yield "on_switch", "no policy changes the rank"
    if not options.get("warm_start", True):
        yield "on_switch", "compressor.warm_start is false"
    if options.get("orthonormalisation") == "qr":
        yield "eps", "compressor.orthonormalisation=qr needs none"


def _paper_floats(compressor: "PowerSGD", spec: TensorSpec, level: float | None, workers: int) -> int:
    """Return (n + m) min(n, m, r), even if this exceeds n m; a rank above both sides is dense."""
    if level is None or spec.ndim < compressor.traits.min_ndim or level > max(spec.matrix):
        return spec.numel
    return min(*spec.matrix, int(level)) * sum(spec.matrix)


@with_options
class PowerSGD(LowRank):
    """P = orth(mean_w M_w Q);  Q <- mean_w M_w^T P;  update = P Q^T, for each tensor as a matrix M [n, m].

    Two all-reduces per step, r n and r m floats. Worker w's own contribution is P (M_w^T P)^T.

    Q is stored for the next step (one power iteration converges over steps), unless `warm_start` is false. If a policy
    changes the rank, the leading columns of Q are kept, or all columns are redrawn (`on_switch`; `redraw` is
    Accordion's code). `gramschmidt` is one pass (Accordion's code) and fails on rank-deficient input. Its `eps` is the
    lower bound of the norm that a column is divided by: 0 gives NaN for a zero gradient.

    Source: Vogels, Karimireddy, Jaggi 2019 (arXiv 1905.13727), Algorithm 1.
    """

    warm_start: bool = option("true: each power iteration starts from the last one's result", default=True)
    on_switch: str = option("Q after a policy has changed the rank", default="keep", choices=("keep", "redraw"))
    orthonormalisation: str = option(default="qr", choices=("qr", "gramschmidt"))
    eps: float = option("for gramschmidt", default=1e-8, at_least=0)

    chosen_as = {
        "powersgd": Choice(
            "low rank by one power iteration per step (Vogels et al. 2019)",
            {"error_feedback": True},
            beside=(*FEEDBACK, *TRAVEL),
        )
    }

    description = replace(LowRank.description, advised_levels=(1, 4), idle=_idle, paper_floats=_paper_floats)

    traits = Traits(knob="rank", pair=(1, 2), min_ndim=2, replays=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.traits = replace(self.traits, replays=self.warm_start)

    def transfers(
        self, spec: TensorSpec, level: float, workers: int, kept: Mapping[str, Any] | None = None
    ) -> Sequence[Transfer]:
        rank = self.factor_rank(spec, level) or 0
        return [Transfer("all_reduce", 4 * rank * side) for side in spec.matrix]

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        ranks = [self.factor_rank(spec, level) for spec, level in zip(ctx.specs, ctx.levels, strict=True)]
        dense = [i for i, rank in enumerate(ranks) if rank is None]
        coded = [i for i, rank in enumerate(ranks) if rank is not None]
        given = LowRankInput.of(xs_W, ctx, coded)
        stacks = batches(given.ps_W, ctx.specs, ranks)
        queries = together([[self._query(ctx, i, rank, state, xs_W[i]) for i in ids] for ids, rank, _ in stacks])
        engine = engine_for(xs_W)

        # Only the span of Q matters; orthonormal columns keep M_w Q as well conditioned as M_w.
        Qs = self._orthonormal(engine, queries, passes=1)
        # (M_w Q)^T, [W, G, r, n]
        Pts_W = engine.multiply([Ms_W for _, _, Ms_W in stacks], Qs, given.terms_of(stacks))
        means = comm.all_reduce_mean([*Pts_W, *(xs_W[i] for i in dense)])
        Ps = self._orthonormal(engine, [Pt.mT for Pt in means[: len(stacks)]])

        Qts_W = engine.multiply([Ms_W.mT for _, _, Ms_W in stacks], Ps)  # (M_w^T P)^T, [W, G, r, m]
        Qts = comm.all_reduce_mean(Qts_W)

        update: list[Tensor] = list(xs_W)
        for i, mean in zip(dense, means[len(stacks) :], strict=True):
            update[i] = mean
        # a zero gradient would leave Q = 0, from which no later step could recover: keep the old query instead
        kept = engine.replace_degenerate([Qt.mT for Qt in Qts], queries)
        found: dict[str, Tensor] = {}
        for (ids, _, _), M, Q in zip(stacks, engine.products(Ps, Qts), kept, strict=True):
            for g, i in enumerate(ids):
                update[i] = M[g].view(ctx.specs[i].shape)
                found[ctx.specs[i].name] = Q[g]
        keep_queries(state, found)

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            subtract_({i: targets_W[i] for i in dense if i in targets_W}, xs_W)
            own_W = of_batches(targets_W, [ids for ids, _, _ in stacks])
            engine.subtract_products(own_W, [P.expand(comm.local_workers, -1, -1, -1) for P in Ps], Qts_W)

        given.subtract_sent(coded, subtract_sent_)
        return Exchanged(update, subtract_sent_)

    def _query(self, ctx: Context, i: int, rank: int, state: State, like: Tensor) -> Tensor:
        """Return Q [m, r] for this step: the previous one cut or widened to the rank, or a keyed draw from N(0, 1)."""
        spec = ctx.specs[i]
        q = state.get(spec.name, {}).get("q") if self.warm_start else None
        if self.on_switch == "redraw" and q is not None and q.shape[1] != rank:
            q = None

        def draw(columns: int) -> Tensor:
            return keyed_normal(ctx, "powersgd", spec.name, (spec.matrix[1], columns), rank)

        return with_columns(q, rank, draw, like)

    def _orthonormal(self, engine: Engine, factors: Sequence[Tensor], passes: int = 2) -> list[Tensor]:
        """Return orthonormal columns for matrices [G, n, r] of each batch; a zero matrix gives finite columns."""
        if self.orthonormalisation == "gramschmidt":
            return [_gram_schmidt(factor, self.eps) for factor in factors]
        return engine.orthonormalise(factors, passes)


def _gram_schmidt(P: Tensor, eps: float) -> Tensor:
    columns: list[Tensor] = []
    for column in P.unbind(-1):
        for done in columns:
            column = column - (done * column).sum(-1, keepdim=True) * done
        norm = column.norm(dim=-1, keepdim=True)
        columns.append(column / (norm.clamp_min(eps) if eps else norm))
    return torch.stack(columns, dim=-1)


@with_options
class ACPSGD(LowRank):
    """odd:   Q <- orth(Q);  P = mean_w M_w Q;    update = P Q^T;  worker w's own contribution is P_w Q^T.
    even:  P <- orth(P);  Q = mean_w M_w^T P;  update = P Q^T;  worker w's own contribution is P Q_w^T.

    Each tensor is a matrix M [n, m]. One all-reduce per step carries r n or r m floats: half the rounds and half the
    bytes of PowerSGD. Odd and even count the compressed exchanges of the tensor. The first Q is a keyed draw. The
    factor of an exchange is stored for the next one, as `p` or `q`; this key determines the next turn. If a policy
    changes the rank, leading columns are kept, or keyed draws are appended. A factor that a zero gradient has set to
    zero is replaced by fixed numbers; otherwise every later update would be zero.

    Source: Zhang, Zhang, Shi, Chu, Li 2023 (ICDCS), "Evaluation and Optimization of Gradient Compression for
    Distributed Deep Learning".
    """

    chosen_as = {
        "acpsgd": Choice(
            "low rank by half a power iteration per step, alternating P and Q: one all-reduce (Zhang et al. 2023)",
            {"error_feedback": True},
            beside=(*FEEDBACK, *TRAVEL),
        )
    }

    description = replace(LowRank.description, display_names={"acpsgd": "ACP-SGD"})

    traits = replace(PowerSGD.traits, cycle=2)

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        rank, sides = self.factor_rank(spec, level) or 0, spec.matrix
        side = sum(sides) / 2 if kept is None else sides[is_even({spec.name: dict(kept)}, spec)]
        return [Transfer("all_reduce", 4 * rank * side)]

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        ranks = [self.factor_rank(spec, level) for spec, level in zip(ctx.specs, ctx.levels, strict=True)]
        turns = [None if r is None else (r, is_even(state, spec)) for spec, r in zip(ctx.specs, ranks, strict=True)]
        dense = [i for i, turn in enumerate(turns) if turn is None]
        coded = [i for i, turn in enumerate(turns) if turn is not None]
        given = LowRankInput.of(xs_W, ctx, coded)
        stacks = batches(given.ps_W, ctx.specs, turns)

        kept = together(
            [[self._kept(ctx, i, rank, even, state, xs_W[i]) for i in ids] for ids, (rank, even), _ in stacks]
        )
        engine = engine_for(xs_W)
        Ks = engine.orthonormalise(kept)  # Q [G, m, r] in odd, P [G, n, r] in even exchanges
        # the other factor: (M_w Q)^T [W, G, r, n], or (M_w^T P)^T [W, G, r, m]
        evens = [even for _, (_, even), _ in stacks]
        Ms_W = [M_W.mT if even else M_W for even, (_, _, M_W) in zip(evens, stacks, strict=True)]
        terms_W = given.terms_of(stacks)
        turned_W = [[T.mT for T in own] if even else own for even, own in zip(evens, terms_W, strict=False)]
        Fts_W = engine.multiply(Ms_W, Ks, turned_W)
        means = comm.all_reduce_mean([*Fts_W, *(xs_W[i] for i in dense)])

        update: list[Tensor] = list(xs_W)
        for i, mean in zip(dense, means[len(stacks) :], strict=True):
            update[i] = mean
        news: dict[str, tuple[str, Tensor]] = {}
        made = means[: len(stacks)]
        pairs = [(K, Ft) if even else (Ft.mT, K.mT) for (_, (_, even), _), K, Ft in zip(stacks, Ks, made, strict=True)]
        found = engine.products([left for left, _ in pairs], [right for _, right in pairs])
        news_of = engine.replace_degenerate([Ft.mT for Ft in made], [_fixed(Ft.mT) for Ft in made])
        for (ids, (_, even), _), M, new in zip(stacks, found, news_of, strict=True):
            for g, i in enumerate(ids):
                update[i] = M[g].view(ctx.specs[i].shape)
                news[ctx.specs[i].name] = ("q" if even else "p", new[g])
        take_turns(state, news, comm)

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            subtract_({i: targets_W[i] for i in dense if i in targets_W}, xs_W)
            Ks_W = [K.expand(len(Ft_W), -1, -1, -1) for K, Ft_W in zip(Ks, Fts_W, strict=True)]
            found_W = [
                (K_W, Ft_W) if even else (Ft_W.mT, K_W.mT)
                for (_, (_, even), _), K_W, Ft_W in zip(stacks, Ks_W, Fts_W, strict=True)
            ]
            own_W = of_batches(targets_W, [ids for ids, _, _ in stacks])
            engine.subtract_products(own_W, [left for left, _ in found_W], [right for _, right in found_W])

        given.subtract_sent(coded, subtract_sent_)
        return Exchanged(update, subtract_sent_)

    def _kept(self, ctx: Context, i: int, rank: int, even: bool, state: State, like: Tensor) -> Tensor:
        """Return Q [m, r] for an odd exchange or P [n, r] for an even one, before orthonormalisation."""
        spec = ctx.specs[i]
        rows, key = (spec.matrix[0], "p") if even else (spec.matrix[1], "q")

        def draw(columns: int) -> Tensor:
            return keyed_normal(ctx, "acpsgd", spec.name, (rows, columns), rank)

        return with_columns(state.get(spec.name, {}).get(key), rank, draw, like)


def take_turns(state: State, news: Mapping[str, tuple[str, Tensor]], comm: Comm) -> None:
    """Store the new factor of each tensor for its next exchange, and remove the other factor.

    P and Q use separate buffers that refer to each other, so that a captured exchange can be replayed on a GPU.
    """
    kept: dict[str, tuple[str, Tensor]] = {}
    for name, (key, factor) in news.items():
        other = state.setdefault(name, {}).get("q" if key == "p" else "p")
        place = getattr(other, "other_factor", None)
        if place is None or place.shape != factor.shape:
            place = torch.empty_like(factor, memory_format=torch.contiguous_format)
        place.other_factor = other  # type: ignore[union-attr]
        kept[name] = key, place
    if kept:
        torch._foreach_copy_([place for _, place in kept.values()], [factor for _, factor in news.values()])

    def turn() -> None:
        for name, (key, place) in kept.items():
            state[name].pop("q" if key == "p" else "p", None)
            state[name][key] = place

    comm.ledger.beside(turn)


def is_even(state: State, spec: TensorSpec) -> bool:
    """Whether the next exchange of a tensor is even: P was sent last, and Q is sent next."""
    return "p" in state.get(spec.name, {})


def _fixed(like: Tensor) -> Tensor:
    """Return fixed numbers with independent columns [1, n, r], in place of each of the factors [G, n, r]."""
    shape = like.shape[1:]
    return fixed_numbers(shape.numel(), like.dtype, like.device).view(1, *shape)
