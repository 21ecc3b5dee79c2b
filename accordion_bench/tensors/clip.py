"""Clipping by the global norm."""

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.options import checks


def check_clipping(norm: object, at: object) -> None:
    """Check the options `clip_norm` and `clip_at`.

    Raises:
        ValueRefused: if one is invalid.
    """
    if norm is not None:
        checks.number("clip_norm", norm, above=0, instead=1.0)
    if at is not None:
        checks.choice("clip_at", at, ["before", "after"])


def clip_factor(xs: Sequence[Tensor], norm: float) -> Tensor:
    """Return the factor that reduces the global L2 norm of tensors to `norm`; 1 if it is at most that or non-finite."""
    # by row, because the third digit of one float32 sum over millions of entries would be wrong
    rows = [torch.linalg.vector_norm(x.flatten(1) if x.ndim > 1 else x, dim=-1).flatten() for x in xs]
    total = torch.cat(rows).norm()
    # non-finite tensors stay unchanged, so that the error names the right parameter
    return torch.where(total.isfinite(), (norm / total).clamp_max(1.0), 1.0)
