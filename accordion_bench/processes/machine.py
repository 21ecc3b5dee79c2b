"""Compute settings of a process: GPU selection, memory allocator, deterministic kernels and threads.

Timing code applies them with `run_settings`, so that a timed step has the settings of a run.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from accordion_bench.comm.sealed_store import SealedStore, whole_number
from accordion_bench.options.checks import ConfigError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST_KEPT = 256 * 2**20  # largest allocation kept after it is freed, bytes


def keep_freed_memory() -> bool:
    """Make malloc keep freed blocks of up to 256 MiB instead of returning them to the system. This cannot be undone.

    By default glibc requests every block above 32 MiB from the system and returns it when it is freed, so each page of
    a large activation faults in every step: docs/performance.md. The only cost is that the process keeps its peak size.

    Returns:
        whether the setting was applied; other C libraries (macOS, musl) do not support it.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def give_back() -> None:
    """Return currently free memory to the system; memory freed later is kept as before."""
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of glibc; None if the C library does not have it."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), name)
    except AttributeError:
        return None


# cuBLAS is deterministic with this workspace; torch.compile without autotuning
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"}


@contextlib.contextmanager
def use_deterministic_variables(deterministic: bool) -> Iterator[None]:
    """Context that sets the variables for deterministic results, which CUDA reads at start-up and children inherit.

    Args:
        deterministic: the option; false = no change. Variables set by the user are kept.
    """
    ours = {name: value for name, value in VARIABLES.items() if deterministic and name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


@contextlib.contextmanager
def use_deterministic_kernels(deterministic: bool, device: str) -> Iterator[None]:
    """Context that selects deterministic kernels, or on a GPU the fastest ones; restores the settings at its end.

    Args:
        deterministic: true = no kernels with an undefined order of summation, no TF32, no search for the fastest
            convolution. false = torch's setting of TF32, and that search.
        device: `cpu` or `cuda`; almost all kernels of a CPU are deterministic.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    filling: Any = torch.utils.deterministic  # a module with a property
    mode, searched, filled = torch.get_deterministic_debug_mode(), cudnn.benchmark, filling.fill_uninitialized_memory
    tf32 = matmul.allow_tf32, cudnn.allow_tf32
    if deterministic:
        torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms imports the compiler, four seconds
        filling.fill_uninitialized_memory = False  # a debugging aid that costs a kernel per new tensor
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


def gpu_count() -> int:
    """Return the number of GPUs visible to this process."""
    return torch.cuda.device_count()


def own_gpu(local_rank: int, seen: int) -> torch.device:
    """Return the GPU of this process.

    Args:
        local_rank: rank of the process on its machine.
        seen: number of visible GPUs; a single one belongs to this process, whatever its rank.
    """
    return torch.device("cuda", local_rank % seen)


def take_gpu(device: torch.device) -> None:
    """Make this the current GPU of the thread, before anything is allocated on the first one."""
    torch.cuda.set_device(device)


def gpu_uuid(device: torch.device) -> str:
    """Return the unique identifier of a GPU, which does not depend on its index in this process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def gpu_model(device: torch.device) -> str:
    """Return the model name of a GPU."""
    return torch.cuda.get_device_name(device)


def gpu_identity(uuid: str, index: int, environ: Mapping[str, str]) -> str:
    """Return the identifier of a GPU, or of its MIG partition if CUDA_VISIBLE_DEVICES names one.

    Args:
        uuid: identifier of the GPU.
        index: its index in this process.
        environ: environment of the process.
    """
    names = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = names[index].strip() if index < len(names) else ""
    return f"{uuid} {name}" if name.startswith("MIG-") else uuid


def refuse_shared_gpu(store: SealedStore, rank: int, mine: str) -> None:
    """Refuse a GPU that another process of the run uses, for which NCCL would raise an obscure error or hang.

    Args:
        store: store of the run.
        rank: rank of this process.
        mine: `gpu_identity` of its GPU.

    Raises:
        ConfigError: another process of the run uses this GPU.
    """
    first = store.first(f"gpu {mine}", str(rank), whole_number)
    if first != rank:
        raise ConfigError(
            f"comm=nccl must have a GPU for each process, got {mine} for the ranks {first} and {rank}; type comm=gloo "
            "where they are to share it, or let each process see its own (Slurm: srun --gpus-per-task=1)"
        )


def mixed_gpu_warning(models: Sequence[str]) -> str:
    """Return the warning for a run on several GPU models; "" if all are equal.

    Args:
        models: GPU models of all processes, by rank.
    """
    ranks = {model: [rank for rank, other in enumerate(models) if other == model] for model in models}
    if len(ranks) < 2:
        return ""
    kinds = ", ".join(
        f"{model} ({'ranks' if len(own) > 1 else 'rank'} {_numbers(own)})" for model, own in ranks.items()
    )
    return (
        f"this run has GPUs of {len(ranks)} kinds: {kinds}; the slowest sets the pace, and each rounds in its own way"
    )


def _numbers(ranks: Sequence[int]) -> str:
    """Format ranks as `0-3`, or `0, 2, 5 ...`."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks[:3])) + (" ..." if len(ranks) > 3 else "")


@contextlib.contextmanager
def run_settings(device: str, threads: int | None = None, deterministic: bool = False) -> Iterator[None]:
    """Context with the compute settings of a run. It restores threads and kernels, but not `keep_freed_memory`.

    Args:
        device: `cpu` or `cuda`.
        threads: number of threads of torch; None = unchanged.
        deterministic: the option of the run.

    Example:
        with run_settings("cpu", threads=1):
            model(batch)
    """
    if device == "cpu":
        keep_freed_memory()
    with (
        computing_with(threads),
        use_deterministic_variables(deterministic),
        use_deterministic_kernels(deterministic, device),
    ):
        yield


@contextlib.contextmanager
def computing_with(threads: int | None) -> Iterator[None]:
    """Context with this number of torch threads; None = unchanged."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
