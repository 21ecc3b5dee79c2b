"""The one place where kernels are started."""

import contextlib
from typing import Any

import torch
import triton.language as tl

TYPES = {torch.float32: tl.float32, torch.float64: tl.float64}


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any) -> None:
    """Start a kernel; nobody waits for it.

    Args:
        kernel: made by `triton.jit`.
        grid: how many programs; none start where one of these is 0.
        device: where its tensors are; a thread's current GPU may be another one.
        args: tensors, numbers.
        constants: what it is compiled for.
    """
    if 0 in grid:
        return
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*args, **constants, enable_fp_fusion=False)  # an expression is rounded where it is written
