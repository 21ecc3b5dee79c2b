"""Kernels for GPUs in Triton, which is part of torch on Linux.

A module equals the module of the same name in `kernels` in results, bit for bit, and in arguments, except that numbers
are on the GPU; addresses, tables, streams and codebooks come from the host. The host does not synchronise. Without
Triton, torch computes the same. Import these modules on first use, after a check of `usable`.

A program processes one slice of a tensor: groups of codes that fill whole bytes, as an array [groups, 8].
"""

import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor


@functools.cache
def installed() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def usable(xs: Sequence[Tensor]) -> bool:
    """Return whether kernels support these tensors: on CUDA, all float32 or all float64."""
    if not xs or not installed():
        return False
    kind = xs[0].dtype
    return kind in (torch.float32, torch.float64) and all(x.device.type == "cuda" and x.dtype == kind for x in xs)
