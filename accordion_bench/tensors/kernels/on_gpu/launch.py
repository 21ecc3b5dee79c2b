"""Launch of Triton kernels."""

import contextlib
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


def stride(x: Tensor) -> int:
    """Return the row stride of [W, M] in elements; 0 for equal rows or a vector."""
    return x.stride(0) if x.ndim > 1 else 0


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any) -> None:
    """Launch a kernel asynchronously.

    Args:
        kernel: function of `triton.jit`.
        grid: numbers of programs; no launch if one is 0.
        device: device of the tensors, which may differ from the current device.
        args: tensors and numbers.
        constants: constants of the compilation.
    """
    if 0 not in grid:
        start(kernel, grid, device, args, constants)


def start(
    kernel: Any, grid: tuple[int, ...], device: torch.device, args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """Launch once, without fused multiply-add, so that codes equal those of torch bit for bit."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*args, **constants, enable_fp_fusion=False)
