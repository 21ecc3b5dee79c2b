"""The one place where kernels are started."""

import contextlib
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


def stride(x: Tensor) -> int:
    """From row to row of [W, M], in numbers; 0 where rows are the same or there are none."""
    return x.stride(0) if x.ndim > 1 else 0


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any) -> None:
    """Start a kernel; the host does not wait for it.

    Args:
        kernel: made by `triton.jit`.
        grid: how many programs; nothing is started where one of these is 0.
        device: where its tensors are; a thread's current GPU may be another one.
        args: tensors, numbers.
        constants: what it is compiled for.
    """
    if 0 not in grid:
        start(kernel, grid, device, args, constants)


def start(
    kernel: Any, grid: tuple[int, ...], device: torch.device, args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    """One launch. An expression is rounded where it is written, so that codes equal those of torch to the bit."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*args, **constants, enable_fp_fusion=False)
