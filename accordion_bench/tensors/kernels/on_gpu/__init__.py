"""The same kernels for GPUs, in Triton, which comes with torch on Linux.

Modules have the names of their twins, and compute the same to the bit. Arguments are the same, but that numbers lie on
the GPU; addresses, tables, streams and codebooks come from the host. The host does not wait. Where Triton is
missing, torch does it. Modules import Triton, so they are imported where they are used; `usable` is asked first.

A program does one slice of a tensor: groups of codes that fill whole bytes. All threads are in step, so a slice is an
array [groups, 8].
"""

import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor


@functools.cache
def installed() -> bool:
    """Whether Triton is."""
    return importlib.util.find_spec("triton") is not None


def usable(xs: Sequence[Tensor]) -> bool:
    """Whether kernels take these tensors: of one type, float32 or float64, on a GPU of CUDA."""
    if not xs or not installed():
        return False
    kind = xs[0].dtype
    return kind in (torch.float32, torch.float64) and all(x.device.type == "cuda" and x.dtype == kind for x in xs)
