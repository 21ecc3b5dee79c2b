"""Copies for checkpoints, on the CPU, and the way back."""

import torch
from torch import Tensor


def copy_on_cpu(x: Tensor) -> Tensor:
    """A copy that does not change; of a device's tensor without a second one on the device."""
    return x.detach().to("cpu", copy=True)


@torch.no_grad()
def restore_(x: Tensor, saved: Tensor) -> None:
    """x <- a saved copy of it. Of another shape it is none: `copy_` would spread one number over all of x.

    Raises:
        ValueError: it has another shape.
    """
    if saved.shape != x.shape:
        raise ValueError(f"a tensor has the shape {list(saved.shape)} where {list(x.shape)} belongs")
    x.copy_(saved)


def restored(like: Tensor, saved: Tensor) -> Tensor:
    """A saved copy as a new tensor beside one that has its shape; raises as `restore_`."""
    x = torch.empty_like(like)
    restore_(x, saved)
    return x
