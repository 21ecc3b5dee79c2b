"""Products of matrices with thin factors in plain torch, one batch at a time.

Tensor suffixes: W local workers.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from accordion_bench.tensors.same_shape import as_matrices


def multiply(matrices_W: Sequence[Tensor], factors: Sequence[Tensor]) -> list[Tensor]:
    """See `Engine.multiply`.

    Factors are rows [r, n], because products with two columns are 3 to 5 times slower in MKL.
    """
    return [F.mT @ M_W.mT for M_W, F in zip(matrices_W, factors, strict=True)]


def subtract_products(
    targets_W: Mapping[int, Tensor], left_W: Tensor, right_W: Tensor, alpha: float, copies: bool
) -> None:
    """See `Engine.subtract_products`; for one batch.

    Args:
        targets_W: tensors [W, ...], by index in the batch.
        left_W: [W, G, n, r].
        right_W: [W, G, r, m].
        alpha: factor.
        copies: whether concatenating matrices is cheaper than an operation on each matrix.
    """
    W, G, n, m = *left_W.shape[:3], right_W.shape[3]
    together = as_matrices(list(targets_W.values()), (n, m)) if len(targets_W) == G > 1 else None
    if together is not None:
        together.baddbmm_(left_W.reshape(W * G, n, -1), right_W.reshape(W * G, -1, m), alpha=-alpha)
        return
    if len(targets_W) == G > 1 and copies:
        products = (left_W @ right_W).unbind(1)
        torch._foreach_sub_([x_W.view(W, n, m) for x_W in targets_W.values()], list(products), alpha=alpha)
        return
    for g, target_W in targets_W.items():
        target_W.view(W, n, m).baddbmm_(left_W[:, g], right_W[:, g], alpha=-alpha)


def replace_degenerate(news: Sequence[Tensor], olds: Sequence[Tensor]) -> list[Tensor]:
    """See `Engine.replace_degenerate`."""
    largest = torch.stack(torch._foreach_norm([new for own in news for new in own], torch.inf)) if news else None
    if largest is None:
        return []
    alive = (largest > 0).split([len(own) for own in news])  # NaN is not
    return [torch.where(some[:, None, None], new, old) for some, new, old in zip(alive, news, olds, strict=True)]
