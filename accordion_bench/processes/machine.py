"""What a process computes with: its GPU, freed memory, deterministic algorithms; and all of it as in a run.

Trials and benches set it, too: a step that is timed under other settings than those of a run says nothing of the run.
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
LARGEST_KEPT = 256 * 2**20  # bytes of one tensor


def keep_freed_memory() -> bool:
    """Let this process keep what it has freed, up to tensors of 256 MiB, instead of giving it back to the system.

    glibc takes every block above 32 MiB from the system anew and gives it back when it is freed, so that each page of
    a large activation faults in every step: docs/performance.md. Costs nothing but that the process stays as large as
    it was at its largest. It cannot be undone.

    Returns:
        whether it was done; other C libraries (macOS, musl) have no such option.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def give_back() -> None:
    """Give back to the system what is free at the moment; what is freed later is kept as before."""
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc's; None where another C library has none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), name)
    except AttributeError:
        return None


# cuBLAS repeats itself with such a workspace; torch.compile without timing its own kernels
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "TORCHINDUCTOR_DETERMINISTIC": "1"}


@contextlib.contextmanager
def use_deterministic_variables(deterministic: bool) -> Iterator[None]:
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
def use_deterministic_kernels(deterministic: bool, device: str) -> Iterator[None]:
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


def gpu_count() -> int:
    """How many GPUs this process sees."""
    return torch.cuda.device_count()


def own_gpu(local_rank: int, seen: int) -> torch.device:
    """The GPU that this process computes on.

    Args:
        local_rank: of the process on its machine.
        seen: how many GPUs it sees; one alone is its own, whatever its rank.
    """
    return torch.device("cuda", local_rank % seen)


def take_gpu(device: torch.device) -> None:
    """Make it the GPU of this thread, before anything lands on the first one."""
    torch.cuda.set_device(device)


def gpu_uuid(device: torch.device) -> str:
    """What no other GPU is called, whatever its number in this process."""
    return str(torch.cuda.get_device_properties(device).uuid)


def gpu_model(device: torch.device) -> str:
    """What its maker calls it."""
    return torch.cuda.get_device_name(device)


def gpu_identity(uuid: str, index: int, environ: Mapping[str, str]) -> str:
    """What this process computes on: a GPU, or the part of one that CUDA_VISIBLE_DEVICES names.

    Args:
        uuid: of the GPU.
        index: its number in this process.
        environ: of the process.
    """
    names = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = names[index].strip() if index < len(names) else ""
    return f"{uuid} {name}" if name.startswith("MIG-") else uuid


def refuse_shared_gpu(store: SealedStore, rank: int, mine: str) -> None:
    """Refuse to share a GPU with another process; NCCL would say so in words of its own, or hang.

    Args:
        store: of the run.
        rank: of this process.
        mine: the `gpu_identity` of its GPU.

    Raises:
        ConfigError: another process of the run has it already.
    """
    first = store.first(f"gpu {mine}", str(rank), whole_number)
    if first != rank:
        raise ConfigError(
            f"comm=nccl must have a GPU for each process, got {mine} for the ranks {first} and {rank}; type comm=gloo "
            "where they are to share it, or let each process see its own (Slurm: srun --gpus-per-task=1)"
        )


def unlike_gpus(models: Sequence[str]) -> str:
    """The sentence for a run on GPUs of several kinds; "" where all are alike.

    Args:
        models: of all processes, by rank.
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
    """`0-3`, or `0, 2, 5 ...`."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks[:3])) + (" ..." if len(ranks) > 3 else "")


@contextlib.contextmanager
def as_in_a_run(device: str, threads: int | None = None, deterministic: bool = False) -> Iterator[None]:
    """Compute as a run does; afterwards threads and kernels are as before. Memory that is kept once stays kept.

    Args:
        device: `cpu` or `cuda`.
        threads: of torch; None = as many as there are.
        deterministic: the option of the run.

    Example:
        with as_in_a_run("cpu", threads=1):
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
    """So many threads of torch inside; None = as many as there are."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
