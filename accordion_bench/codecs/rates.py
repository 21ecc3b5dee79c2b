"""Learning rates for compressors that apply them: floats on a CPU, tensors on a GPU.

With tensors, captured work can be replayed while rates change, see `tensors.upload`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Context
from accordion_bench.tensors.upload import fresh


def rates_of(ctx: Context, ids: Iterable[int], like: Tensor) -> list[tuple[Any, list[int]]]:
    """Group tensors by learning rate: (rate, indices), where a rate is a float or a 0-dimensional tensor.

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
