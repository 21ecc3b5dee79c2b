"""Determinism: which kernels torch computes with, for the time of a run."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

# cuBLAS repeats itself with such a workspace; torch.compile without timing its own kernels
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"}


@contextlib.contextmanager
def use_variables(deterministic: bool) -> Iterator[None]:
    """Set what is read when CUDA starts, here or in a process that is started from here; afterwards all is as it was.

    Args:
        deterministic: the option; without it nothing is touched. What the user has exported stays.
    """
    ours = {name: value for name, value in VARIABLES.items() if deterministic and name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextlib.contextmanager
def use_kernels(deterministic: bool, device: str) -> Iterator[None]:
    """Choose kernels: those that repeat themselves, or on a GPU the fastest ones; afterwards all is as it was.

    Args:
        deterministic: true: no kernel whose sums depend on what came first, no TF32, no search for the fastest
            convolution. false: TF32 as torch has it, and that search.
        device: `cpu` or `cuda`; a processor has only kernels that repeat themselves, but for a few.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    filling: Any = torch.utils.deterministic  # a module with a property
    mode, searched, filled = torch.get_deterministic_debug_mode(), cudnn.benchmark, filling.fill_uninitialized_memory
    tf32 = matmul.allow_tf32, cudnn.allow_tf32
    if deterministic:
        torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms imports the compiler, four seconds
        filling.fill_uninitialized_memory = False  # looks for errors, and costs a kernel for each new tensor
        cudnn.benchmark = matmul.allow_tf32 = cudnn.allow_tf32 = False
    elif device == "cuda":
        cudnn.benchmark = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        cudnn.benchmark, filling.fill_uninitialized_memory = searched, filled
        if deterministic:
            matmul.allow_tf32, cudnn.allow_tf32 = tf32
