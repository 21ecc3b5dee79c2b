"""Copies for checkpoints, on the CPU."""

from torch import Tensor


def copy_on_cpu(x: Tensor) -> Tensor:
    """A copy that nobody else changes; of a device's tensor without a second one on the device."""
    return x.detach().to("cpu", copy=True)
