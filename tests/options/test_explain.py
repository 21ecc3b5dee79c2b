"""What a user reads where the machine has no more memory, threads or processes: one sentence."""

import multiprocessing
import os

import numpy as np
import pytest
import torch

from accordion_bench.options.advice import explain

TERABYTES = 10**13


def raised(call) -> BaseException:
    with pytest.raises(BaseException) as caught:
        call()
    return caught.value


def no_process():
    """A fork that the system refuses."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fork", lambda: (_ for _ in ()).throw(BlockingIOError(11, os.strerror(11))))
        multiprocessing.get_context("fork").Process(target=print).start()


@pytest.mark.parametrize(
    ("error", "got"),
    [
        (raised(lambda: torch.empty(TERABYTES)), "DefaultCPUAllocator: can't allocate memory: you tried to allocate "),
        (raised(lambda: np.empty(TERABYTES)), "Unable to allocate "),
        (raised(lambda: bytearray(TERABYTES**2 // 10**9)), "MemoryError"),
        (RuntimeError("std::bad_alloc"), "std::bad_alloc"),
        (OSError(12, os.strerror(12)), "[Errno 12] Cannot allocate memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "CUDA out of memory. Tried to "),
        (RuntimeError("CUDA error: out of memory\nmore\nlines"), "CUDA error: out of memory more lines"),
    ],
)
def test_no_more_memory(error, got):
    told = explain(error)
    assert told and "\n" not in told and "; type micro_batch_size=N for the same batch in parts, a smaller " in told
    assert told.startswith("memory must hold the model, and a batch of every worker of a process, which ran out (")
    assert f"({got}" in told


@pytest.mark.parametrize(
    ("error", "got"),
    [
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (RuntimeError("Resource temporarily unavailable"), "Resource temporarily unavailable"),  # std::system_error
        (raised(no_process), "[Errno 11] Resource temporarily unavailable"),
    ],
)
def test_no_more_threads(error, got):
    told = explain(error)
    assert told and "\n" not in told and told.endswith("or ulimit -u NUMBER for a higher limit")
    assert f"must let a process start another thread or process, got no more of them ({got}" in told


@pytest.mark.parametrize(
    "error",
    [ValueError("out of memory"), BlockingIOError(11, "Resource temporarily unavailable"), RuntimeError("boom")],
)
def test_other_errors_keep_their_traceback(error):
    assert explain(error) is None
