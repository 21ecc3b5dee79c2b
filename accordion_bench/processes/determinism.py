"""Determinism: which kernels torch computes with, for the time of a run."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextlib.contextmanager
def use_workspace(deterministic: bool) -> Iterator[None]:
    """Give cuBLAS a workspace with which it repeats itself; before CUDA starts, here or in a process started from here.

    Args:
        deterministic: the option; without it nothing is touched. What the user has exported stays.
    """
    ours = deterministic and WORKSPACE not in os.environ
    if ours:
        os.environ[WORKSPACE] = ":4096:8"
    try:
        yield
    finally:
        if ours:
            os.environ.pop(WORKSPACE, None)


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
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    searched, filled = cudnn.benchmark, filling.fill_uninitialized_memory
    tf32 = matmul.allow_tf32, cudnn.allow_tf32
    if deterministic:
        torch.use_deterministic_algorithms(True)
        filling.fill_uninitialized_memory = False  # looks for errors, and costs a kernel for each new tensor
        cudnn.benchmark = matmul.allow_tf32 = cudnn.allow_tf32 = False
    elif device == "cuda":
        cudnn.benchmark = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.benchmark, filling.fill_uninitialized_memory = searched, filled
        if deterministic:
            matmul.allow_tf32, cudnn.allow_tf32 = tf32
