"""Kernels in Triton, on the GPU that is there; without one by Triton's interpreter, on a pretended device.

The interpreter is chosen when Triton is imported: in the conftest of all tests.
"""

from types import SimpleNamespace

import pytest
import torch

from accordion_bench.codecs import engines
from accordion_bench.conformance.pretend_device import DEVICE, Pretend, pretended, real
from accordion_bench.tensors.kernels import on_gpu

THERE = torch.cuda.is_available()


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that Triton's kernels are used on: its `device`, and the `counts` of a pretended one."""
    pytest.importorskip("triton")
    if THERE:
        yield SimpleNamespace(device=torch.device("cuda"), counts=None)
        return
    from accordion_bench.tensors.kernels.on_gpu import launch

    def interpret(kernel, grid, device, args, constants):
        Pretend.counts.launches[kernel.__name__] += 1
        kernel[grid](*map(real, args), **constants)

    monkeypatch.setattr(on_gpu, "usable", lambda xs: bool(xs) and all(isinstance(x, Pretend) for x in xs))
    monkeypatch.setattr(launch, "start", interpret)
    with pretended() as counts:
        monkeypatch.setattr(engines, "STAND_INS", [])
        yield SimpleNamespace(device=DEVICE, counts=counts)
