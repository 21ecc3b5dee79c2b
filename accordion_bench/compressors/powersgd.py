"""PowerSGD: low-rank gradients by one power iteration per step."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.base import Context, Exchanged, State, dense_bytes
from accordion_bench.compressors.low_rank import LowRank, batches, unit_columns, with_columns
from accordion_bench.compressors.orthonormal import Batches, orthonormal, vectors
from accordion_bench.compressors.powersgd_stacks import exchange_stacks
from accordion_bench.compressors.traits import Traits
from accordion_bench.options import checks
from accordion_bench.options.component import Idle, Surroundings
from accordion_bench.options.instantiate import Config
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.upload import upload


class PowerSGD(LowRank):
    """P = orth(mean_w M_w Q);  Q <- mean_w M_w^T P;  update = P Q^T, for each tensor as a matrix M [n, m].

    Two all-reduces per step, r n and r m floats. Worker w's own contribution is P (M_w^T P)^T.

    Args:
        rank: columns of P and Q; lower rank = more compression.
        min_compression_rate: a matrix is compressed only if r (n + m) times this is below n m; else it travels dense.
            0 compresses every tensor with two dimensions or more, as Accordion's code does.
        warm_start: keep Q for the next step (one power iteration converges over steps); false draws it anew.
        on_switch: when a policy changes the rank: `keep` the leading columns of Q, or `redraw` all (Accordion's code).
        orthonormalisation: `qr`, or `gramschmidt` (one pass, Accordion's code; fails on rank-deficient input).
        eps: smallest norm that a column is divided by; 0 with `gramschmidt` gives NaN on a zero gradient.

    Source: Vogels, Karimireddy, Jaggi 2019 (arXiv 1905.13727), Algorithm 1.
    """

    traits = Traits(knob="rank", pair=(1, 2), tried=(1, 4), min_ndim=2, replays=True)

    def __init__(
        self,
        rank: int = 2,
        min_compression_rate: float = 2,
        warm_start: bool = True,
        on_switch: str = "keep",
        orthonormalisation: str = "qr",
        eps: float = 1e-8,
    ) -> None:
        super().__init__(rank, min_compression_rate)
        self.warm_start = checks.boolean("warm_start", warm_start)
        self.traits = replace(self.traits, replays=self.warm_start)
        self.on_switch = checks.choice("on_switch", on_switch, ["keep", "redraw"])
        self.orthonormalisation = checks.choice("orthonormalisation", orthonormalisation, ["qr", "gramschmidt"])
        self.eps = checks.number("eps", eps, at_least=0, instead=1e-8)

    @classmethod
    def idle(cls, options: Config, around: Surroundings) -> Idle:
        yield from super().idle(options, around)
        if not around.steered_by:
            yield "on_switch", "no policy changes the rank"
        if not options.get("warm_start", True):
            yield "on_switch", "compressor.warm_start is false"
        if options.get("orthonormalisation") == "qr":
            yield "eps", "compressor.orthonormalisation=qr needs none"

    def payload_bytes(self, spec: TensorSpec, level: float | None, workers: int) -> int:
        rank = self.factor_rank(spec, level)
        return dense_bytes(spec) if rank is None else 4 * rank * sum(spec.matrix)

    def paper_floats(self, spec: TensorSpec, level: float | None, workers: int) -> int:
        """(n + m) min(n, m, r), also where this is more than n m; a rank beyond both sides is dense."""
        if level is None or spec.ndim < self.traits.min_ndim or level > max(spec.matrix):
            return spec.numel
        return min(*spec.matrix, int(level)) * sum(spec.matrix)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        ranks = [self.factor_rank(spec, level) for spec, level in zip(ctx.specs, ctx.levels, strict=True)]
        if xs_W and xs_W[0].device.type != "cpu":
            given = {i: self._query(ctx, i, rank, state, xs_W[i]) for i, rank in enumerate(ranks) if rank is not None}
            return exchange_stacks(xs_W, ranks, given, self._orthonormal_vectors, ctx, state, comm)
        dense = [i for i, rank in enumerate(ranks) if rank is None]
        stacks = batches(xs_W, ctx.specs, ranks)
        queries = [torch.stack([self._query(ctx, i, rank, state, xs_W[i]) for i in ids]) for ids, rank, _ in stacks]

        # Factors are multiplied and sent as rows, [r, n]: with two columns a product is 3 to 5 times slower (MKL).
        # Only the span of Q matters; orthonormal columns keep M_w Q as well conditioned as M_w.
        Pts_W = [  # (M_w Q)^T, [W, G, r, n]
            self._orthonormal(Q).mT @ Ms_W.mT for (_, _, Ms_W), Q in zip(stacks, queries, strict=True)
        ]
        means = comm.all_reduce_mean([*Pts_W, *(xs_W[i] for i in dense)])
        Ps = [self._orthonormal(Pt.mT) for Pt in means[: len(stacks)]]

        Qts_W = [P.mT @ Ms_W for (_, _, Ms_W), P in zip(stacks, Ps, strict=True)]  # (M_w^T P)^T, [W, G, r, m]
        Qts = comm.all_reduce_mean(Qts_W)

        update: list[Tensor] = list(xs_W)
        for i, mean in zip(dense, means[len(stacks) :], strict=True):
            update[i] = mean
        for (ids, _, _), P, Qt, Q_old in zip(stacks, Ps, Qts, queries, strict=True):
            # a zero gradient would leave Q = 0, from which no later step could recover: keep the old query instead
            kept = torch.where(Qt.mT.abs().amax(dim=(-2, -1), keepdim=True) > 0, Qt.mT, Q_old)
            for g, (i, approximation) in enumerate(zip(ids, P @ Qt, strict=True)):
                update[i] = approximation.view(ctx.specs[i].shape)
                self._keep(state.setdefault(ctx.specs[i].name, {}), kept[g])

        W = comm.local_workers
        factors_W = {
            i: (P[g].expand(W, -1, -1), Qt_W[:, g])
            for (ids, _, _), P, Qt_W in zip(stacks, Ps, Qts_W, strict=True)
            for g, i in enumerate(ids)
        }

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            for i, target_W in targets_W.items():
                if i in factors_W:  # M_w - P Q_w^T
                    target_W.view(W, *ctx.specs[i].matrix).baddbmm_(*factors_W[i], alpha=-1)
                else:
                    target_W.sub_(xs_W[i])

        return Exchanged(update, subtract_sent_)

    def _query(self, ctx: Context, i: int, rank: int, state: State, like: Tensor) -> Tensor:
        """Q [m, r] for this step: the last one, cut or widened to the rank, or a keyed draw from N(0, 1)."""
        spec = ctx.specs[i]
        q = state.get(spec.name, {}).get("q") if self.warm_start else None
        if self.on_switch == "redraw" and q is not None and q.shape[1] != rank:
            q = None
        return with_columns(q, rank, lambda columns: self._draw(ctx, spec, rank, columns, like))

    @staticmethod
    def _keep(entries: dict[str, Tensor], q: Tensor) -> None:
        """For the next step; in place, because another stream may still read the one before."""
        if "q" in entries and entries["q"].shape == q.shape:
            entries["q"].copy_(q)
        else:
            entries["q"] = q.clone()

    @staticmethod
    def _draw(ctx: Context, spec: TensorSpec, rank: int, columns: int, like: Tensor) -> Tensor:
        generator = keyed_rng.generator(ctx.seed, "powersgd", spec.name, ctx.step, rank)
        drawn = torch.randn(spec.matrix[1], columns, generator=generator, dtype=torch.float64)
        return upload(drawn.to(like.dtype), like.device)

    def _orthonormal(self, P: Tensor) -> Tensor:
        """Orthonormal columns for each matrix [G, n, r]; a zero matrix gives finite columns."""
        if self.orthonormalisation == "gramschmidt":
            return _gram_schmidt(P, self.eps)
        return unit_columns(P)

    def _orthonormal_vectors(self, flat: Tensor, batches: Batches, columns: bool) -> Tensor:
        """The same on a device for many matrices, one after another in a vector; see `orthonormal`."""
        if self.orthonormalisation == "gramschmidt":
            given = vectors(flat, batches, columns)
            found = [_gram_schmidt(x.mT, self.eps) for x in given]
            return torch.cat([(x if columns else x.mT).reshape(-1) for x in found])
        # of Q only the span matters
        return orthonormal(flat, batches, columns, passes=1 if columns else 2)


def _gram_schmidt(P: Tensor, eps: float) -> Tensor:
    columns: list[Tensor] = []
    for column in P.unbind(-1):
        for done in columns:
            column = column - (done * column).sum(-1, keepdim=True) * done
        norm = column.norm(dim=-1, keepdim=True)
        columns.append(column / (norm.clamp_min(eps) if eps else norm))
    return torch.stack(columns, dim=-1)
