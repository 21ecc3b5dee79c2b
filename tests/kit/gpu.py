"""A device for Triton's kernels: the GPU if there is one, else a pretended device with Triton's interpreter."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from accordion_bench.codecs import engines
from accordion_bench.conformance.pretend_device import DEVICE, Pretend, pretended, real
from accordion_bench.tensors.kernels import on_gpu
from tests.kit import interpreter

THERE = torch.cuda.is_available()


@contextlib.contextmanager
def gpu_for_triton() -> Iterator[SimpleNamespace]:
    """Return its `device`, and the `counts` of a pretended device.

    The interpreter is selected when Triton is imported, by the conftest of all tests.
    """
    pytest.importorskip("triton")
    if THERE:
        yield SimpleNamespace(device=torch.device("cuda"), counts=None)
        return
    from accordion_bench.tensors.kernels.on_gpu import launch

    def interpret(kernel, grid, device, args, constants):
        Pretend.counts.launches[kernel.__name__] += 1
        kernel[grid](*map(real, args), **constants)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(on_gpu, "usable", lambda xs: bool(xs) and all(isinstance(x, Pretend) for x in xs))
        patched.setattr(launch, "start", interpret)
        with interpreter.prepared(), pretended() as counts, pytest.MonkeyPatch.context() as within:
            within.setattr(engines, "STAND_INS", [])
            yield SimpleNamespace(device=DEVICE, counts=counts)
