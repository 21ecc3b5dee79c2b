"""Bucket: tensors that are exchanged together, with all inputs of their encoding, and the error of non-finite input.

Tensor suffixes: W local workers, R rows of a target, N coordinates.
"""

import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.kernels.dense_kernels import Coordinates, ResidualInputs
from accordion_bench.tensors.same_shape import in_rows, one_allocation
from accordion_bench.tensors.upload import fresh


@dataclass(frozen=True)
class Feedback:
    """Encode p = a x + d e + b u in place of x; then e <- m (p - decoded message).

    Args:
        residuals_W: e of each tensor, [W, ...]; None = no residual, x is encoded.
        scales: a of each tensor: a float, or a 0-dimensional tensor on a device.
        decay: d.
        masks: m of each tensor, [...], zeros and ones; None = 1.
        momenta: u of each tensor, [...]; None = 0.
        momentum: b.
    """

    residuals_W: Sequence[Any]
    scales: Sequence[Any]
    decay: float = 1.0
    masks: Sequence[Tensor | None] = ()
    momenta: Sequence[Tensor | None] = ()
    momentum: float = 0.0

    def take(self, which: Sequence[int]) -> "Feedback | None":
        """Return the feedback of some tensors; None if they have no residuals."""
        residuals_W = [self.residuals_W[k] for k in which]
        if not residuals_W or residuals_W[0] is None:
            assert all(e_W is None for e_W in residuals_W), "some tensors of a bucket have residuals, some have not"
            return None
        masks, momenta = ([own[k] for k in which] if own else () for own in (self.masks, self.momenta))
        scales = [self.scales[k] for k in which]
        return replace(self, residuals_W=residuals_W, scales=scales, masks=masks, momenta=momenta)

    def only(self, which: Container[int]) -> "Feedback | None":
        """Return the feedback without the residuals of other tensors; None if no residual remains."""
        residuals_W = [e_W if k in which else None for k, e_W in enumerate(self.residuals_W)]
        return None if all(e_W is None for e_W in residuals_W) else replace(self, residuals_W=residuals_W)

    def cut(self, parts: Sequence[tuple[int, int, int]]) -> "Feedback | None":
        """Return the feedback of slices of tensors.

        Args:
            parts: (index of the tensor, start, stop) of each slice.
        """
        own = self.take([k for k, _, _ in parts])
        if own is None:
            return None
        cuts = [slice(start, stop) for _, start, stop in parts]
        residuals_W = [in_rows(e_W)[:, cut] for e_W, cut in zip(own.residuals_W, cuts, strict=True)]
        masks, momenta = (
            [None if x is None else x.view(-1)[cut] for x, cut in zip(given, cuts, strict=False)]
            for given in (own.masks, own.momenta)
        )
        return replace(own, residuals_W=residuals_W, masks=masks, momenta=momenta)

    @property
    def is_sum(self) -> bool:
        """Whether p = x + e for every tensor."""
        plain = all(not isinstance(scale, Tensor) and scale == 1 for scale in self.scales)
        return plain and self.decay == 1 and all(u is None for u in self.momenta)

    @property
    def rates(self) -> list[Tensor]:
        """Scales that are tensors on a device."""
        return [scale for scale in self.scales if isinstance(scale, Tensor)]

    @property
    def rows_W(self) -> list[Tensor]:
        """Residuals as rows [W, N]; views."""
        return [in_rows(e_W) for e_W in self.residuals_W]

    def fits_kernels(self, rows_W: Sequence[Tensor], shared: Tensor | None) -> bool:
        """Return whether kernels of a GPU can add the residuals in their read and write the encoding error.

        Args:
            rows_W: coordinates [W, N]; kernels require float32.
            shared: scales that are not in the messages; kernels require None.
        """
        rates, side_by_side = self.rates, all(e_W.stride(1) == 1 for e_W in self.rows_W)
        alike = len(rates) == len(self.scales) or (not rates and len(set(self.scales)) == 1)
        alike = alike and len({u is None for u in self.momenta}) <= 1
        return side_by_side and alike and shared is None and rows_W[0].dtype == torch.float32

    def form(self, xs_W: Sequence[Tensor]) -> Sequence[Tensor]:
        """Compute p of each tensor in the storage of its residual, so that no third buffer is needed."""
        if self.decay != 1:
            torch._foreach_mul_(list(self.residuals_W), self.decay)
        led = [(e_W, u) for e_W, u in zip(self.residuals_W, self.momenta, strict=False) if u is not None]
        for w in range(len(led[0][0]) if led else 0):
            own = [e_W[w] for e_W, _ in led]
            torch._foreach_add_(own, [u.view(e.shape) for e, (_, u) in zip(own, led, strict=True)], alpha=self.momentum)
        groups: dict[Any, list[int]] = {}
        for k, scale in enumerate(self.scales):
            groups.setdefault(id(scale) if isinstance(scale, Tensor) else float(scale), []).append(k)
        for ks in groups.values():
            kept, given = one_allocation([self.residuals_W[k] for k in ks], [xs_W[k] for k in ks])
            scale = self.scales[ks[0]]
            if isinstance(scale, Tensor):
                torch._foreach_add_(kept, torch._foreach_mul(given, scale))
            else:
                torch._foreach_add_(kept, given, alpha=scale)
        return self.residuals_W

    def mask(self) -> None:
        """Multiply the residuals by their masks in place."""
        pairs = [(e_W, m) for e_W, m in zip(self.residuals_W, self.masks, strict=False) if m is not None]
        for w in range(len(self.residuals_W[0]) if pairs else 0):
            torch._foreach_mul_([e_W[w] for e_W, _ in pairs], [m.view(e_W[w].shape) for e_W, m in pairs])


class NonFiniteRow(ValueError):
    """Raised if the input of an encoder contains NaN or infinity, or if its norm exceeds float32.

    Args:
        row: index of the first such row.
    """

    def __init__(self, row: int) -> None:
        super().__init__(f"row {row} holds NaN or infinity, or its norm exceeds float32")
        self.row = row


def refuse_non_finite(values_R: Tensor, t: int = 0, tensors: int = 1) -> None:
    """Raise NonFiniteRow for the first row [N] that contains NaN or infinity; on the CPU only.

    On a GPU the check would synchronise with the host. There the flags of the exchange, which are read once per step,
    report non-finite values.

    Args:
        values_R: rows [R, N].
        t, tensors: row r is reported as r x tensors + t.
    """
    if values_R.device.type != "cpu":
        return
    finite_R = values_R.isfinite().all(1)
    if not finite_R.all():
        raise NonFiniteRow(int((~finite_R).nonzero()[0]) * tensors + t)


@dataclass(frozen=True)
class Context:
    """Inputs of an exchange besides the tensors.

    Args:
        step: number of optimizer steps before this one.
        specs: name and shape of each tensor.
        levels: compression level of each tensor (a rank, a density; 1 without a knob); None = not compressed.
        seed: seed of the run, for keyed random draws.
        lrs: learning rate of this step for each tensor, for methods in parameter units.
        codebooks: quantisation levels fitted by a policy, by number of bits; empty = those of the compressor.
        feedback: residuals that the encoder adds to the tensors and updates with its error; None = no error feedback.
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
    """Tensors of an exchange that are encoded together; no level is None.

    Args:
        xs_W: tensors [W, ...], one per spec.
        workers: ranks of the W local workers.
        purpose: part of the keys of random draws; "" for the workers' tensors, `server` for the mean of an owner.
    """

    xs_W: Sequence[Tensor] = ()
    workers: Sequence[int] = ()
    purpose: str = ""

    @classmethod
    def of(cls, xs_W: Sequence[Tensor], ctx: Context, ids: Sequence[int], workers: Sequence[int]) -> Self:
        """Return a bucket of the tensors `ids` of an exchange of all `xs_W`, for local workers of these ranks."""
        specs, levels = [ctx.specs[i] for i in ids], [ctx.levels[i] for i in ids]
        lrs = [ctx.lrs[i] for i in ids] if ctx.lrs else ()
        feedback = ctx.feedback.take(ids) if ctx.feedback else None
        return cls(ctx.step, specs, levels, ctx.seed, lrs, ctx.codebooks, feedback, [xs_W[i] for i in ids], workers)

    @functools.cached_property
    def rows_W(self) -> list[Tensor]:
        """Tensors as rows [W, N]."""
        return [in_rows(x_W) for x_W in self.xs_W]

    @functools.cached_property
    def coordinates(self) -> Coordinates:
        """Addresses of the tensors for kernels, with residuals if `feedback` is set."""
        own = self.feedback
        if own is None:
            return Coordinates.of(self.rows_W)
        weight = 1.0 if own.rates else own.scales[0]
        fed = ResidualInputs(own.rows_W, weight, own.rates, own.decay, own.masks, own.momenta, own.momentum)
        return Coordinates.of(self.rows_W, fed)

    @property
    def numels(self) -> tuple[int, ...]:
        """Number of coordinates of each tensor."""
        return tuple(spec.numel for spec in self.specs)

    def take(self, which: Sequence[int]) -> "Bucket":
        """Return a bucket of the tensors with these indices."""
        if len(which) == len(self.specs):
            return self
        xs_W, specs = [self.xs_W[k] for k in which], [self.specs[k] for k in which]
        levels = [self.levels[k] for k in which]
        lrs = [self.lrs[k] for k in which] if self.lrs else ()
        feedback = self.feedback.take(which) if self.feedback else None
        return replace(self, xs_W=xs_W, specs=specs, levels=levels, lrs=lrs, feedback=feedback)

    def formed(self) -> "Bucket":
        """Return the bucket with residuals added, in the storage of the residuals; `feedback` is None."""
        if self.feedback is None:
            return self
        return replace(self, xs_W=self.feedback.form(self.xs_W), feedback=None)

    def at(self, moment: Context) -> "Bucket":
        """Return the bucket with the step and the learning rates of another moment."""
        lrs = dict(zip((spec.name for spec in moment.specs), moment.lrs, strict=False))
        return replace(self, step=moment.step, lrs=[lrs[spec.name] for spec in self.specs if spec.name in lrs])

    def keys(self, stream: str) -> list[list[int]]:
        """Return the keys of random draws, [W][T].

        Args:
            stream: name of the random stream. The results of every run depend on it, so it must never change.
        """
        beginnings = _beginnings(self.seed, stream, self.purpose, tuple(spec.name for spec in self.specs))
        return [keyed_rng.closed(beginnings, self.step, worker) for worker in self.workers]


@functools.lru_cache(maxsize=64)
def _beginnings(seed: int, stream: str, purpose: str, names: tuple[str, ...]) -> list[bytes]:
    """Return the parts of keys that are equal in all steps."""
    return [keyed_rng.opened(seed, stream, purpose, name) for name in names]


@dataclass(frozen=True)
class Target:
    """Destination of decoded messages: row = (row + alpha x messages in the order of senders) / divisor.

    Args:
        rows_R: rows [R, N] of each tensor; messages of sender s are added to row s mod R.
        alpha: 1 or -1.
        divisor: divisor of all coordinates; 1 for a sum.
        empty: whether the rows are uninitialised, and count as zeros.
        clears: whether coordinates in sparse messages are set to 0 instead of added to.
    """

    rows_R: Sequence[Tensor]
    alpha: float = 1.0
    divisor: int = 1
    empty: bool = False
    clears: bool = False

    def begun(self) -> "Target":
        """Return the target after zeroing uninitialised rows."""
        if not self.empty:
            return self
        torch._foreach_zero_(list(self.rows_R))
        return replace(self, empty=False)

    def divide_(self) -> None:
        """Divide the rows by the divisor, one tensor at a time."""
        if self.divisor != 1:
            for row_R in self.rows_R:
                row_R.div_(self.divisor)

    def take(self, which: Sequence[int]) -> "Target":
        """Return the target of the tensors with these indices."""
        if len(which) == len(self.rows_R):
            return self
        return replace(self, rows_R=[self.rows_R[k] for k in which])


def by_level(levels: Sequence[float]) -> list[tuple[float, list[int]]]:
    """Group the indices of tensors by level: (level, indices) in the order of first occurrence."""
    found: dict[float, list[int]] = {}
    for k, level in enumerate(levels):
        found.setdefault(level, []).append(k)
    return list(found.items())


def rates_of(ctx: Context, ids: Iterable[int], like: Tensor) -> list[tuple[Any, list[int]]]:
    """Group tensors by learning rate: (rate, indices).

    A rate is a float on a CPU, and a 0-dimensional tensor on a GPU, so that captured work can be replayed while rates
    change, see `tensors.upload`.

    Args:
        ctx: inputs of the exchange of the step.
        ids: indices of the tensors.
        like: tensor with the dtype and the device of the rates.
    """
    groups: dict[float, list[int]] = {}
    for i in ids:
        groups.setdefault(float(ctx.lrs[i]), []).append(i)
    if like.device.type == "cpu" or not groups:
        return list(groups.items())
    names = [ctx.specs[own[0]].name for own in groups.values()]

    def numbers(moment: Context) -> Tensor:
        rates = dict(zip((spec.name for spec in moment.specs), moment.lrs, strict=True))
        return torch.tensor([rates[name] for name in names], dtype=like.dtype)

    return list(zip(fresh(numbers, ctx, like.device).unbind(), groups.values(), strict=True))


def rate_of_each(ctx: Context, like: Tensor, ids: Sequence[int]) -> list[Any]:
    """Return the learning rate of each tensor; arguments as for `rates_of`."""
    of = {i: rate for rate, own in rates_of(ctx, ids, like) for i in own}
    return [of[i] for i in ids]


def pattern(ctx: Context) -> tuple[int, ...]:
    """Return which tensors have equal rates and which a rate of 0; captured work is valid while this is unchanged."""
    first: dict[float, int] = {}
    return tuple(first.setdefault(float(lr), i) if lr else -1 for i, lr in enumerate(ctx.lrs))
