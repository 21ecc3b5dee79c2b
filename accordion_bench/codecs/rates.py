"""Learning rates, for methods that apply them: numbers of the host on a CPU, of the device elsewhere.

So a device may repeat captured work while rates change, see `tensors.upload`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Context
from accordion_bench.tensors.upload import fresh


def rates_of(ctx: Context, ids: Iterable[int], like: Tensor) -> list[tuple[Any, list[int]]]:
    """Each learning rate of some tensors, a float or a tensor without dimensions, and the tensors that have it.

    Args:
        ctx: of the step.
        ids: indices of the tensors.
        like: gives type and device.
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
    """The learning rate of each of some tensors; arguments as for `rates_of`."""
    of = {i: rate for rate, own in rates_of(ctx, ids, like) for i in own}
    return [of[i] for i in ids]


def pattern(ctx: Context) -> tuple[int, ...]:
    """Which tensors have equal rates, and which a rate of 0: while that stays, captured work may be repeated."""
    first: dict[float, int] = {}
    return tuple(first.setdefault(float(lr), i) if lr else -1 for i, lr in enumerate(ctx.lrs))
