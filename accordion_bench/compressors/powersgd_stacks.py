"""PowerSGD on a device: a few launches for all matrices of a shape, wherever they lie, and no wait of the host.

The same collectives as on the CPU, of the same size; inside, matrices stand in another order, so that all with equal
rows are orthonormalised together.

Tensor suffixes: W local workers.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm, split_like
from accordion_bench.compressors.base import Context, Exchanged, State, subtract_
from accordion_bench.compressors.orthonormal import Batches
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.same_shape import as_matrices

Orthonormal = Callable[[Tensor, Batches, bool], Tensor]
"""(vectors one after another, their batches, whether they are columns) to orthonormal ones."""


class Stack(NamedTuple):
    """Matrices of one shape and rank.

    ids: G indices of tensors.
    rank: r, of all of them.
    Ms_W: the matrices [W, G, n, m].
    """

    ids: list[int]
    rank: int
    Ms_W: Tensor

    @property
    def rows(self) -> tuple[int, int, int]:
        """(G, r, n)."""
        return len(self.ids), self.rank, self.Ms_W.shape[2]

    @property
    def columns(self) -> tuple[int, int, int]:
        """(G, r, m)."""
        return len(self.ids), self.rank, self.Ms_W.shape[3]


def exchange_stacks(
    xs_W: Sequence[Tensor],
    ranks: Sequence[int | None],
    queries: Mapping[int, Tensor],
    orthonormal: Orthonormal,
    ctx: Context,
    state: State,
    comm: Comm,
) -> Exchanged:
    """One step of PowerSGD.

    Args:
        xs_W: tensors [W, ...].
        ranks: of each; None = it travels dense.
        queries: Q [m, r] of each that has a rank.
        orthonormal: makes vectors so.
        ctx: of the step.
        state: keeps the new queries.
        comm: collectives.
    """
    dense = [i for i, rank in enumerate(ranks) if rank is None]
    stacks = _stacks(xs_W, ctx.specs, ranks)
    if not stacks:
        return Exchanged(comm.all_reduce_mean(xs_W), lambda targets_W: subtract_(targets_W, xs_W))
    by_n = sorted(range(len(stacks)), key=lambda s: (stacks[s].rows[2], stacks[s].rank))
    by_m = sorted(range(len(stacks)), key=lambda s: (stacks[s].columns[2], stacks[s].rank))
    rows, columns = [stacks[s].rows for s in by_n], [stacks[s].columns for s in by_m]

    olds = torch.cat([queries[i].reshape(-1) for s in by_m for i in stacks[s].ids])
    flat = orthonormal(olds, _joined(columns), True)
    Qs = dict(zip(by_m, _parts(flat, [(count, m, r) for count, r, m in columns]), strict=True))

    Pts_W = [Qs[s].mT @ stacks[s].Ms_W.mT for s in by_n]  # (M_w Q)^T, [W, G, r, n]
    mean = comm.all_reduce_mean_flat([*Pts_W, *(xs_W[i] for i in dense)])
    size = sum(P_W[0].numel() for P_W in Pts_W)
    factors, whole = mean[:size], mean[size:]
    Pts = dict(zip(by_n, _parts(orthonormal(factors, _joined(rows), False), rows), strict=True))

    Qts_W = {s: Pts[s] @ stacks[s].Ms_W for s in by_m}  # (M_w^T P)^T, [W, G, r, m]
    news = comm.all_reduce_mean_flat(list(Qts_W.values()))
    Qts = dict(zip(by_m, _parts(news, columns), strict=True))
    _keep_queries(state, [ctx.specs[i].name for s in by_m for i in stacks[s].ids], news, olds, _joined(columns))

    update: list[Tensor] = list(xs_W)
    for i, part in zip(dense, split_like(whole, [xs_W[i][0] for i in dense]), strict=True):
        update[i] = part
    for s, stack in enumerate(stacks):
        for i, approximation in zip(stack.ids, Pts[s].mT @ Qts[s], strict=True):
            update[i] = approximation.view(ctx.specs[i].shape)

    def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
        subtract_({i: target_W for i, target_W in targets_W.items() if ranks[i] is None}, xs_W)
        apart: list[tuple[Tensor, Tensor]] = []
        for s, stack in enumerate(stacks):
            own_W = {g: targets_W[i].view_as(stack.Ms_W[:, g]) for g, i in enumerate(stack.ids) if i in targets_W}
            apart += _subtract_stack_(own_W, Pts[s].mT, Qts_W[s])
        if apart:  # M_w - P Q_w^T
            torch._foreach_sub_([target_W for target_W, _ in apart], [sent_W for _, sent_W in apart])

    return Exchanged(update, subtract_sent_)


def _stacks(xs_W: Sequence[Tensor], specs: Sequence[TensorSpec], ranks: Sequence[int | None]) -> list[Stack]:
    """Matrices of equal shape and rank together; copied where they do not lie side by side."""
    alike: dict[tuple[tuple[int, int], int], list[int]] = {}
    for i, (spec, rank) in enumerate(zip(specs, ranks, strict=True)):
        if rank is not None:
            alike.setdefault((spec.matrix, rank), []).append(i)
    stacks = []
    for (matrix, rank), ids in alike.items():
        together = as_matrices([xs_W[i] for i in ids], matrix)
        if together is None:
            Ms_W = torch.stack([xs_W[i].reshape(-1, *matrix) for i in ids], dim=1)
        else:
            Ms_W = together.unflatten(0, (-1, len(ids)))
        stacks.append(Stack(ids, rank, Ms_W))
    return stacks


def _joined(batches: Batches) -> list[tuple[int, int, int]]:
    """Neighbours of equal size as one batch."""
    sizes = groupby(batches, key=lambda batch: batch[1:])
    return [(sum(count for count, _, _ in some), r, n) for (r, n), some in sizes]


def _parts(flat: Tensor, shapes: Sequence[tuple[int, int, int]]) -> list[Tensor]:
    """A vector as tensors of these shapes, one after another."""
    parts = flat.split([a * b * c for a, b, c in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _keep_queries(state: State, names: Sequence[str], news: Tensor, olds: Tensor, batches: Batches) -> None:
    """Keep Q for the next step; the old one where a zero gradient has left Q = 0, from which no step could recover.

    In place, because another stream may still read the one before.

    Args:
        state: of the compressor.
        names: of the tensors, as they stand in the vectors.
        news: Q^T [r, m] of each.
        olds: Q [m, r] of each, of this step.
        batches: (G, r, m).
    """
    Qts = _parts(news, batches)
    alive = torch.stack(torch._foreach_norm([Qt for some in Qts for Qt in some], torch.inf)) > 0
    shapes = [(count, m, r) for count, r, m in batches]
    kept = _parts(torch.empty_like(olds), shapes)
    parts = zip(alive.split([len(Q) for Q in kept]), Qts, _parts(olds, shapes), kept, strict=True)
    for some, Qt, old, out in parts:
        torch.where(some[:, None, None], Qt.mT, old, out=out)
    places, values = [], []
    for name, q in zip(names, (q for some in kept for q in some), strict=True):
        entries = state.setdefault(name, {})
        if "q" in entries and entries["q"].shape == q.shape:
            places.append(entries["q"])
            values.append(q)
        else:
            entries["q"] = q.clone()
    if places:
        torch._foreach_copy_(places, values)


def _subtract_stack_(own_W: Mapping[int, Tensor], P: Tensor, Qt_W: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Subtract P Q_w^T from matrices [W, n, m] of a stack; or give (target, what is to be subtracted) of each.

    Args:
        own_W: targets, by place in the stack.
        P: [G, n, r].
        Qt_W: [W, G, r, m].
    """
    targets_W = list(own_W.values())
    together = as_matrices(targets_W, (P.shape[1], Qt_W.shape[3])) if len(own_W) == len(P) > 1 else None
    if together is not None:
        together.baddbmm_(P.repeat(len(Qt_W), 1, 1) if len(Qt_W) > 1 else P, Qt_W.flatten(0, 1), alpha=-1)
        return []
    if len(own_W) == len(P) > 1:
        return list(zip(targets_W, (P @ Qt_W).unbind(1), strict=True))
    for g, target_W in own_W.items():
        target_W.baddbmm_(P[g].expand(len(Qt_W), -1, -1), Qt_W[:, g], alpha=-1)
    return []
