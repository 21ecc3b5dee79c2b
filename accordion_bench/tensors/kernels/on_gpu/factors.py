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
    above = float(np.nextafter(np.float32(scale), np.float32(np.inf)))
    grid = (triton.cdiv(norms.numel(), TOGETHER),)
    launch(_factors, grid, norms.device, norms, norms.numel(), float(scale), above, out, TOGETHER=TOGETHER)
    return out


@triton.jit
def _factors(norms, n, scale, above, out, TOGETHER: tl.constexpr):  # type: ignore[no-untyped-def]
    b = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    norm = tl.load(norms + b, mask=b < n, other=1)
    factor = tl.div_rn(scale, norm)
    factor = tl.where(norm * factor < scale, tl.div_rn(above, norm), factor)
    tl.store(out + b, tl.where(factor > LARGEST, LARGEST, factor), mask=b < n)  # NaN stays
