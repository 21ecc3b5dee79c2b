"""Shared by methods with a frozen variance: two-way sign compression with error feedback, and the variance's divisor.

Tensor suffixes: W local workers.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from accordion_bench.codecs.engines import engine_for
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Context, Exchanged, State
from accordion_bench.compressors.error_feedback import ErrorFeedback
from accordion_bench.compressors.sign import Sign
from accordion_bench.compressors.two_way import TwoWay

ALIVE = "alive"


class AdamSigns(ErrorFeedback):
    """CA(a x_w): signs of a x_w + e_w to the owners, signs of their mean + e~ back; the errors remain in e_w and e~.

    The scale is ||u||_2 / sqrt(d) on both sides, and sgn 0 = +1. A sign cannot represent 0. Dead coordinates (see
    `declare_dead`) are decoded as 0 and have no residual, which would otherwise follow the scale indefinitely.

    With a momentum factor b, b m is added to every a x_w. m is stored in the state of tensors that send signs.

    Args:
        weight: a.
        momentum: b.

    Source: Tang et al. 2021 (arXiv 2102.02888); Lu et al. 2022 (arXiv 2202.06009).
    """

    def __init__(self, weight: float = 1.0, momentum: float = 0.0) -> None:
        super().__init__(TwoWay(Sign("l2"), residual=True))
        self.weight, self.momentum = weight, momentum

    def scales(self, ctx: Context) -> Sequence[float]:
        return [self.weight] * len(ctx.specs)

    def masks(self, ctx: Context, state: State) -> Sequence[Tensor | None]:
        return [state.get(spec.name, {}).get(ALIVE) for spec in ctx.specs]

    def momenta(self, ctx: Context, state: State) -> tuple[Sequence[Tensor | None], float]:
        if not self.momentum:
            return (), 0.0
        pairs = zip(ctx.specs, ctx.levels, strict=True)
        return [None if level is None else state[spec.name]["momentum"] for spec, level in pairs], self.momentum

    def exchange_signs(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        """Exchange signs without masking: the values of dead coordinates are undefined."""
        return super().exchange(xs_W, ctx, state, comm)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        out = self.exchange_signs(xs_W, ctx, state, comm)
        pairs = zip(out.update, self.masks(ctx, state), strict=True)
        if alive := [(update, mask) for update, mask in pairs if mask is not None]:
            torch._foreach_mul_([update for update, _ in alive], [mask for _, mask in alive])
        return out


def declare_dead(state: State, variances: Mapping[str, Tensor]) -> None:
    """Store in a state of `AdamSigns` which coordinates have never had a gradient: those whose variance is 0.

    The mask `alive` is 0 there and 1 elsewhere. A tensor that is dead as a whole needs no mask, because the scale of
    zeros is 0, nor does one that is alive as a whole. On a GPU all tensors get one, because a check would synchronise.

    Args:
        state: changed in place.
        variances: [...], by name of the tensor.
    """
    for name, v in variances.items():
        own, living = state.setdefault(name, {}), v > 0
        own.pop(ALIVE, None)
        if not engine_for([v]).checks_input or 0 < int(living.sum()) < v.numel():
            own[ALIVE] = living.to(v.dtype)


def inverse_root(variance: Tensor, eps: float) -> Tensor:
    """Return 1 / (sqrt v + eps), or 0 where v is 0, so that such a coordinate does not move."""
    return torch.where(variance > 0, (variance.sqrt() + eps).reciprocal(), 0)
