"""Kernels: loops over the tensors of a bucket, compiled by numba if it is installed (the extra `fast`).

Kernels do not depend on compressors. A kernel reads tensors by their addresses and writes into an existing message or
sum; one call handles all tensors of a bucket. Modules of this package import numba, and those of `on_gpu` Triton.
Import them on first use, after a check of `usable`. Without kernels, torch computes the same results, and the same
codes bit for bit.
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor


@functools.cache
def installed() -> bool:
    """Return whether numba is installed."""
    return importlib.util.find_spec("numba") is not None


def version() -> str:
    """Return the version of numba; "" if it is not installed."""
    return importlib.metadata.version("numba") if installed() else ""


def usable(xs: Sequence[Tensor]) -> bool:
    """Return whether compiled loops support these tensors: on a CPU, all float32 or all float64."""
    if not xs or not installed():
        return False
    kind = xs[0].dtype
    return kind in (torch.float32, torch.float64) and all(x.device.type == "cpu" and x.dtype == kind for x in xs)
