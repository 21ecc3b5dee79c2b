"""Choice of the engine by dtype and device of tensors.

Modules with kernels import numba or Triton, so they are imported on first use.
"""

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from accordion_bench.codecs.engine import Engine, OnDevice
from accordion_bench.tensors import kernels
from accordion_bench.tensors.kernels import on_gpu

PLAIN, ON_DEVICE = Engine(), OnDevice()

STAND_INS: list[Callable[[Sequence[Tensor]], Engine | None]] = []
"""Functions that are called first: they return the engine of tensors on a pretended device, or None."""


def engine_for(xs: Sequence[Tensor]) -> Engine:
    """Return the engine for tensors, by dtype and device."""
    for stand_in in STAND_INS:
        if engine := stand_in(xs):
            return engine
    if kernels.usable(xs):
        return _on_cpu()
    if on_gpu.usable(xs):
        return _on_gpu()
    return PLAIN if not xs or xs[0].device.type == "cpu" else ON_DEVICE


@functools.cache
def _on_cpu() -> Engine:
    from accordion_bench.codecs.on_cpu import OnCpu

    return OnCpu()


@functools.cache
def _on_gpu() -> Engine:
    from accordion_bench.codecs.on_gpu import OnGpu

    return OnGpu()
