"""Bucket: tensors that are exchanged together, and everything that an encoder may depend on.

Tensor suffixes: W local workers, R rows of a target, N coordinates.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from accordion_bench.codecs.feedback import Feedback
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.kernels.dense_kernels import Coordinates, Fed
from accordion_bench.tensors.same_shape import in_rows


@dataclass(frozen=True)
class Context:
    """All that an exchange may know besides the tensors.

    Args:
        step: optimizer steps taken before this one.
        specs: name and shape of each exchanged tensor.
        levels: the knob's value per tensor (a rank, a density; 1 without a knob); None = this tensor travels dense.
        seed: the run's seed, for keyed draws.
        lrs: learning rate of this step per tensor, for methods in parameter units.
        codebooks: quantisation levels that a policy has fitted, per number of bits; none = the compressor's own.
        feedback: residuals that the encoder adds to tensors, and in which it keeps what is lost; None = there are none.
    """

    step: int
    specs: Sequence[TensorSpec]
    levels: Sequence[Any]
    seed: int = 0
    lrs: Sequence[float] = ()
    codebooks: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    feedback: Feedback | None = None


@dataclass(frozen=True)
class Bucket(Context):
    """Tensors of an exchange that are encoded together; each has a level.

    Args:
        xs_W: tensors [W, ...], one for each spec.
        workers: numbers of the local workers, W of them.
        purpose: part of the keys of random draws; "" for the workers' own tensors, `server` for an owner's mean.
    """

    xs_W: Sequence[Tensor] = ()
    workers: Sequence[int] = ()
    purpose: str = ""

    @classmethod
    def of(cls, xs_W: Sequence[Tensor], ctx: Context, ids: Sequence[int], workers: Sequence[int]) -> Self:
        """Some of an exchange's tensors [W, ...], by their indices.

        Args:
            xs_W: all tensors of the exchange.
            ctx: of the exchange.
            ids: which of them.
            workers: numbers of the local workers.
        """
        specs, levels = [ctx.specs[i] for i in ids], [ctx.levels[i] for i in ids]
        lrs = [ctx.lrs[i] for i in ids] if ctx.lrs else ()
        feedback = ctx.feedback.take(ids) if ctx.feedback else None
        return cls(ctx.step, specs, levels, ctx.seed, lrs, ctx.codebooks, feedback, [xs_W[i] for i in ids], workers)

    @functools.cached_property
    def rows_W(self) -> list[Tensor]:
        """The tensors as rows [W, N]."""
        return [in_rows(x_W) for x_W in self.xs_W]

    @functools.cached_property
    def coordinates(self) -> Coordinates:
        """The same as kernels are told of it, with residuals where there are any."""
        own = self.feedback
        if own is None:
            return Coordinates.of(self.rows_W)
        weight = 1.0 if own.rates else own.scales[0]
        fed = Fed(own.rows_W, weight, own.rates, own.decay, own.masks, own.momenta, own.momentum)
        return Coordinates.of(self.rows_W, fed)

    @property
    def numels(self) -> tuple[int, ...]:
        """Coordinates of each tensor."""
        return tuple(spec.numel for spec in self.specs)

    def take(self, which: Sequence[int]) -> "Bucket":
        """Some of the tensors."""
        if len(which) == len(self.specs):
            return self
        xs_W, specs = [self.xs_W[k] for k in which], [self.specs[k] for k in which]
        levels = [self.levels[k] for k in which]
        lrs = [self.lrs[k] for k in which] if self.lrs else ()
        feedback = self.feedback.take(which) if self.feedback else None
        return replace(self, xs_W=xs_W, specs=specs, levels=levels, lrs=lrs, feedback=feedback)

    def formed(self) -> "Bucket":
        """With what residuals make of its tensors, in the residuals' own storage."""
        if self.feedback is None:
            return self
        return replace(self, xs_W=self.feedback.form(self.xs_W), feedback=None)

    def at(self, moment: Context) -> "Bucket":
        """The same tensors in another step, with that step's rates of those that have them."""
        lrs = dict(zip((spec.name for spec in moment.specs), moment.lrs, strict=False))
        return replace(self, step=moment.step, lrs=[lrs[spec.name] for spec in self.specs if spec.name in lrs])

    def keys(self, stream: str) -> list[list[int]]:
        """Keys of random draws, [W][T].

        Args:
            stream: name of the random stream. The results of every run depend on it: it must never change.
        """
        beginnings = _beginnings(self.seed, stream, self.purpose, tuple(spec.name for spec in self.specs))
        return [keyed_rng.closed(beginnings, self.step, worker) for worker in self.workers]


@functools.lru_cache(maxsize=64)
def _beginnings(seed: int, stream: str, purpose: str, names: tuple[str, ...]) -> list[bytes]:
    """Of the keys of these tensors, which are the same in every step."""
    return [keyed_rng.opened(seed, stream, purpose, name) for name in names]


@dataclass(frozen=True)
class Target:
    """Where decoded messages are added: row = (row + alpha x messages, sender by sender) / divisor.

    Args:
        rows_R: rows [R, N] of each tensor; sender s goes to row s mod R.
        alpha: 1 or -1.
        divisor: of all coordinates; 1 for a sum.
        empty: the rows hold nothing yet, and count as zeros.
        clears: coordinates that sparse messages name become 0, and nothing is added.
    """

    rows_R: Sequence[Tensor]
    alpha: float = 1.0
    divisor: int = 1
    empty: bool = False
    clears: bool = False

    def begun(self) -> "Target":
        """With zeros in rows that were empty."""
        if not self.empty:
            return self
        torch._foreach_zero_(list(self.rows_R))
        return replace(self, empty=False)

    def take(self, which: Sequence[int]) -> "Target":
        """The rows of some tensors."""
        if len(which) == len(self.rows_R):
            return self
        return replace(self, rows_R=[self.rows_R[k] for k in which])


def by_level(levels: Sequence[float]) -> list[tuple[float, list[int]]]:
    """Which tensors have the same level."""
    found: dict[float, list[int]] = {}
    for k, level in enumerate(levels):
        found.setdefault(level, []).append(k)
    return list(found.items())
