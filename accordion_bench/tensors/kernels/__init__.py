"""Kernels: plain loops over the tensors of a bucket, compiled by numba where it is installed (the extra `fast`).

Nothing here knows a compressor. A kernel reads tensors by their addresses, and writes into a message or a sum that
exists; one call does for all tensors of a bucket. Modules of this package import numba, and those of `on_gpu` Triton,
so they are imported where they are used; `usable` is asked first. What torch computes without them is the same, to the
bit where codes are concerned.
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor


@functools.cache
def installed() -> bool:
    """Whether numba is."""
    return importlib.util.find_spec("numba") is not None


def version() -> str:
    """Of numba; "" without it."""
    return importlib.metadata.version("numba") if installed() else ""


def usable(xs: Sequence[Tensor]) -> bool:
    """Whether compiled loops take these tensors: of one type, float32 or float64, in the memory of a CPU."""
    if not xs or not installed():
        return False
    kind = xs[0].dtype
    return kind in (torch.float32, torch.float64) and all(x.device.type == "cpu" and x.dtype == kind for x in xs)
