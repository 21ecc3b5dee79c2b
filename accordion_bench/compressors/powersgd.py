"""PowerSGD: low-rank compression by one power iteration per step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.engine import Engine
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import Transfer
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Context, Exchanged, State, subtract_
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
