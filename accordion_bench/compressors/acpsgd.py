"""ACP-SGD: low-rank compression by half a power iteration per step, alternating between the factors P and Q.

Tensor suffixes: W local workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import Transfer
from accordion_bench.codecs.orthonormal import fixed_numbers
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Context, Exchanged, Kept, State, subtract_
from accordion_bench.compressors.description import FEEDBACK, TRAVEL
from accordion_bench.compressors.low_rank import (
    LowRank,
    LowRankInput,
    batches,
    keyed_normal,
    of_batches,
    together,
    with_columns,
)
from accordion_bench.compressors.powersgd import PowerSGD
from accordion_bench.options.option import Choice, with_options
from accordion_bench.plan import TensorSpec


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
