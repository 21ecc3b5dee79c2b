"""Low-rank base class: which matrices are compressed, batches of equal shape, and stored factors.

Tensor suffixes: W local workers.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Feedback
from accordion_bench.codecs.engines import engine_for
from accordion_bench.compressors.compressor import Compressor, Context, State
from accordion_bench.compressors.description import WhyDense, shorter_messages
from accordion_bench.options.option import NEAREST, option, with_options
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.same_shape import as_matrices
from accordion_bench.tensors.upload import upload

Batch = tuple[list[int], Any, Tensor]
"""(indices of G tensors, their kind, matrices [W, G, n, m])."""


def _why_dense(compressor: "LowRank", spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
    if spec.ndim < compressor.traits.min_ndim or compressor.compresses(spec, level):
        return None
    if level >= min(spec.matrix):
        return WhyDense(f"rank {level:g} exceeds the size of the matrix", shorter_messages(compressor))
    rate = f"{compressor.min_compression_rate:g} times smaller than the matrix"
    return WhyDense(f"factors of rank {level:g} would not be {rate}", shorter_messages(compressor))


@with_options
class LowRank(Compressor):
    """A compressor that sends an n x m matrix as a factor of `rank` columns per side.

    A matrix is compressed only if r (n + m) times `min_compression_rate` is below n m; otherwise it is exchanged dense.
    """

    rank: int = option("lower rank = more compression", default=2, at_least=1, instead=NEAREST)
    min_compression_rate: float = option(
        "matrices that would not become this many times smaller are exchanged dense; 0 = compress all",
        default=2,
        at_least=0,
    )

    description = replace(Compressor.description, why_dense=_why_dense)

    def factor_rank(self, spec: TensorSpec, level: float | None) -> int | None:
        """Return min(n, m, level), or None if the tensor is exchanged dense."""
        if level is None or spec.ndim < self.traits.min_ndim:
            return None
        return self.paying_rank(*spec.matrix, int(level))

    def paying_rank(self, n: int, m: int, rank: int) -> int | None:
        """Return min(n, m, rank), or None if that makes an n x m matrix not `min_compression_rate` times smaller."""
        rank = min(n, m, rank)
        # the rule of torch's hook, a strict inequality; at 0 every matrix is compressed
        return rank if rank * (n + m) * self.min_compression_rate < n * m else None

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return self.factor_rank(spec, level) is not None

    def takes_feedback(self, spec: TensorSpec, level: float | None, workers: int) -> bool:
        return self.compresses(spec, level)


class LowRankInput(NamedTuple):
    """Input of a low-rank exchange.

    ps_W: tensors [W, ...]; those with a residual are in the storage of their residual.
    terms_W: by index, tensors [W, ...] that are to be added to `ps_W`, see `Engine.multiply`.
    feedback: residuals of the compressed tensors; None = no error feedback.
    """

    ps_W: list[Tensor]
    terms_W: dict[int, Tensor]
    feedback: Feedback | None

    @classmethod
    def of(cls, xs_W: Sequence[Tensor], ctx: Context, coded: Sequence[int]) -> "LowRankInput":
        """Add the residuals of an exchange's tensors, or defer sums p = x + e to the read of the first product.

        Args:
            xs_W: tensors [W, ...].
            ctx: inputs of the exchange.
            coded: indices of the tensors that are compressed.
        """
        ps_W, feedback = list(xs_W), ctx.feedback.take(coded) if ctx.feedback else None
        if feedback is None:
            return cls(ps_W, {}, None)
        # batches that copy their matrices would add to the copies
        deferred = feedback.is_sum and engine_for(xs_W).one_by_one
        residuals_W = feedback.residuals_W if deferred else feedback.form([xs_W[i] for i in coded])
        for i, e_W in zip(coded, residuals_W, strict=True):
            ps_W[i] = e_W
        return cls(ps_W, {i: xs_W[i] for i in coded} if deferred else {}, feedback)

    def terms_of(self, stacks: Sequence[Batch]) -> list[list[Tensor]]:
        """Return the terms of each batch as matrices [W, n, m]; empty if no sums are deferred."""
        if not self.terms_W:
            return []
        return [[self.terms_W[i].reshape(-1, *Ms_W.shape[2:]) for i in ids] for ids, _, Ms_W in stacks]

    def subtract_sent(self, coded: Sequence[int], subtract_sent_: Callable[[Mapping[int, Tensor]], Any]) -> None:
        """Store the compression error in the residuals, see `Exchanged.subtract_sent_`."""
        if self.feedback is not None:
            subtract_sent_(dict(zip(coded, self.feedback.residuals_W, strict=True)))
            self.feedback.mask()


def batches(xs_W: Sequence[Tensor], specs: Sequence[TensorSpec], kinds: Sequence[Hashable | None]) -> list[Batch]:
    """Group matrices [W, ...] of equal shape and kind if they are adjacent in memory, or if copies are cheap.

    Matrices of kind None are excluded from all batches; the others form batches of one if grouping saves nothing.
    """
    alike: dict[tuple[tuple[int, ...], Hashable], list[int]] = {}
    for i, (spec, kind) in enumerate(zip(specs, kinds, strict=True)):
        if kind is not None:
            alike.setdefault((spec.shape, kind), []).append(i)
    found: list[Batch] = []
    engine = engine_for(xs_W)
    for (_, kind), ids in alike.items():
        matrix = specs[ids[0]].matrix
        together = as_matrices([xs_W[i] for i in ids], matrix)
        if together is not None:
            found.append((ids, kind, together.unflatten(0, (-1, len(ids)))))
        elif engine.copies and not engine.one_by_one:
            found.append((ids, kind, torch.stack([xs_W[i].reshape(-1, *matrix) for i in ids], dim=1)))
        else:
            found.extend(([i], kind, xs_W[i].reshape(-1, 1, *matrix)) for i in ids)
    return found


def together(factors: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return factors [n, r] of each batch as [G, n, r], with one copy for all batches."""
    if not factors:
        return []
    sizes = [sum(factor.numel() for factor in own) for own in factors]
    parts = torch.cat([factor.reshape(-1) for own in factors for factor in own]).split(sizes)
    return [part.view(len(own), *own[0].shape) for part, own in zip(parts, factors, strict=True)]


def keyed_normal(ctx: Context, stream: str, name: str, shape: Sequence[int], *key: int) -> Tensor:
    """Return keyed draws from N(0, 1) for a tensor, float64 on the CPU; the stream's name must never change."""
    generator = keyed_rng.generator(ctx.seed, stream, name, ctx.step, *key)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def of_batches(found: Mapping[int, Tensor], ids: Sequence[Sequence[int]]) -> list[dict[int, Tensor]]:
    """Return the tensors of each batch by position in the batch, given all by index; some may be missing."""
    return [{g: found[i] for g, i in enumerate(own) if i in found} for own in ids]


def with_columns(kept: Tensor | None, rank: int, draw: Callable[[int], Tensor], like: Tensor) -> Tensor:
    """Return a factor [n, r]: the stored factor, its leading columns, or the stored factor with drawn columns appended.

    Args:
        kept, rank: factor of the previous exchange, None = all columns are drawn; r.
        draw: returns the given number of columns [n, count] from N(0, 1), on the CPU.
        like: defines dtype and device.
    """
    if kept is not None and kept.shape[1] >= rank:
        return kept if kept.shape[1] == rank else kept[:, :rank].contiguous()
    fresh = upload(draw(rank if kept is None else rank - kept.shape[1]).to(like.dtype), like.device)
    if kept is None:
        return fresh
    # the old columns have the gradient's scale; at unit length both parts have equal weight
    engine = engine_for([kept])
    old = engine.orthonormalise([kept[None]])[0][0] if engine.copies else torch.linalg.qr(kept).Q
    return torch.cat([old, fresh / fresh.norm(dim=0)], dim=1)


def keep_queries(state: State, queries: Mapping[str, Tensor]) -> None:
    """Store Q [m, r] of each tensor for the next step, in place because another stream may still read the buffer."""
    places, values = [], []
    for name, q in queries.items():
        entries = state.setdefault(name, {})
        if "q" in entries and entries["q"].shape == q.shape:
            places.append(entries["q"])
            values.append(q)
        else:
            entries["q"] = q.clone(memory_format=torch.contiguous_format)
    if places:
        torch._foreach_copy_(places, values)
