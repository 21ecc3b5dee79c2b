"""Preloading: load and compile a compressor's kernels before any measured step."""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.assemble import Wrapped
from accordion_bench.exchange.exchange import Exchange, SendOptions
from accordion_bench.plan import Ladder, TensorSpec
from accordion_bench.position import StepInfo

MATRIX, NUMBER = TensorSpec("matrix", (5, 27)), TensorSpec("number", (1,))
BUCKETS = [MATRIX], [MATRIX, NUMBER]  # the number is exchanged dense, so that the codes are only part of the message


def preload(wrapped: Wrapped, ladder: Ladder, codebooks: Mapping[int, tuple[float, ...]], like: Tensor) -> None:
    """Exchange small tensors at every level, between two workers of this process, on a copy of the compressor.

    The first step is excluded from measured time, but not every run compresses in it: a local method exchanges later,
    and 1-bit Adam starts dense. Importing numba and reading machine code takes a second, compiling it several seconds.
    For a compressor without kernels this is a no-op.

    Args:
        wrapped: the compressor in its wrappers; unchanged.
        ladder: the knob's values.
        codebooks: of the plan.
        like: a tensor of the dtype and on the device of the tensors to exchange.
    """
    if like.device.type not in wrapped.compressor.description.kernels:
        return
    comm = Comm(2, device=str(like.device))
    for specs in BUCKETS:
        xs_W = [
            torch.linspace(-1, 1, 2 * spec.numel).to(like.device, like.dtype).view(2, *spec.shape) for spec in specs
        ]
        compressor = copy.deepcopy(wrapped.compressor)
        exchange = Exchange(compressor, specs, ladder, comm, like, SendOptions(**wrapped.for_exchange))
        weakest = exchange.weakest()
        for level in range(max(1, len(ladder.values))):
            plan = replace(weakest, levels=dict.fromkeys(weakest.levels, level), codebooks=codebooks)
            for step in sorted({0, exchange.start_step}):
                exchange(xs_W, StepInfo(plan, step, epoch=math.inf))
