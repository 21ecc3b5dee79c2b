"""Which engine takes which tensors.

Modules with kernels import numba or Triton, so they are imported where they are used.
"""

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from accordion_bench.codecs.engine import Engine
from accordion_bench.codecs.reference import OnDevice, Reference
from accordion_bench.tensors import kernels
from accordion_bench.tensors.kernels import on_gpu

STAND_INS: list[Callable[[Sequence[Tensor]], Engine | None]] = []
"""Asked first: engines for tensors that pretend to be on a device."""


def engine_for(xs: Sequence[Tensor]) -> Engine:
    """The engine for tensors, by their type and by where they are."""
    for stand_in in STAND_INS:
        if engine := stand_in(xs):
            return engine
    if kernels.usable(xs):
        return _on_cpu()
    if on_gpu.usable(xs):
        return _on_gpu()
    return _plain() if not xs or xs[0].device.type == "cpu" else _on_device()


@functools.cache
def _on_cpu() -> Engine:
    from accordion_bench.codecs.on_cpu import OnCpu

    return OnCpu()


@functools.cache
def _on_gpu() -> Engine:
    from accordion_bench.codecs.on_gpu import OnGpu

    return OnGpu()


@functools.cache
def _plain() -> Engine:
    return Reference()


@functools.cache
def _on_device() -> Engine:
    return OnDevice()
