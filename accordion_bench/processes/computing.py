"""What a run sets before it computes: threads, kernels, what happens to freed memory. Trials and benches set it, too.

A step that is timed under other settings than those of a run says nothing of the run.
"""

import contextlib
from collections.abc import Iterator

import torch

from accordion_bench.processes import determinism, memory


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
        memory.keep_freed_memory()
    with (
        computing_with(threads),
        determinism.use_variables(deterministic),
        determinism.use_kernels(deterministic, device),
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
