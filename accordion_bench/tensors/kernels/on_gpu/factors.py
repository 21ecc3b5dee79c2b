"""By what coordinates are multiplied before they are rounded to levels."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors.kernels.on_gpu.launch import launch

TOGETHER = 1024  # buckets of a program
LARGEST = tl.constexpr(float(np.finfo(np.float32).max))


def factors(norms: Tensor, scale: float) -> Tensor:
    """See `codecs.rounding.factors`. One launch."""
    norms = norms.contiguous()
    out = torch.empty_like(norms)
    grid = (triton.cdiv(norms.numel(), TOGETHER),)
    launch(_factors, grid, norms.device, norms, norms.numel(), float(scale), above(scale), out, TOGETHER=TOGETHER)
    return out


def above(scale: float) -> float:
    """The float32 that comes after one."""
    return float(np.nextafter(np.float32(scale), np.float32(np.inf)))


@triton.jit
def factors_of(norm, scale, next_above):  # type: ignore[no-untyped-def]
    factor = tl.div_rn(scale, norm)
    factor = tl.where(norm * factor < scale, tl.div_rn(next_above, norm), factor)
    return tl.where(factor > LARGEST, LARGEST, factor)  # NaN stays


@triton.jit
def _factors(norms, n, scale, next_above, out, TOGETHER: tl.constexpr):  # type: ignore[no-untyped-def]
    b = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    norm = tl.load(norms + b, mask=b < n, other=1)
    tl.store(out + b, factors_of(norm, scale, next_above), mask=b < n)
