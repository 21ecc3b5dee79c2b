"""Numbers derived from norms on a GPU, equal to `codecs.block_numbers` bit for bit."""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors.kernels.dense_kernels import NORMS, BlockRule
from accordion_bench.tensors.kernels.on_gpu.launch import launch

TOGETHER = 1024  # blocks of a program
LARGEST = tl.constexpr(float(np.finfo(np.float32).max))
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
ROUNDING = tl.constexpr(1e-15)  # see `codecs.block_numbers.ROUNDING`
L2, LINF, SUM, BELOW, COUNT = (tl.constexpr(NORMS.index(name)) for name in ("l2", "linf", "sum", "below", "count"))


def factors(scales: Tensor, rule: BlockRule) -> Tensor:
    """Return the factors of coordinates, with the shape of the scales. One launch."""
    scales = scales.contiguous()
    out = torch.empty_like(scales)
    grid, top = (triton.cdiv(scales.numel(), TOGETHER),), float(rule.top)
    args = (scales, scales.numel(), top, above(top), out)
    launch(_factors, grid, scales.device, *args, FACTOR=rule.factor, TOGETHER=TOGETHER)
    return out


def above(number: float) -> float:
    """Return the next larger float32."""
    return float(np.nextafter(np.float32(number), np.float32(np.inf)))


def constants_of(rule: BlockRule | None) -> dict[str, Any]:
    """Return the constants of kernels for a rule."""
    if rule is None:
        return {"RULE": "", "OVER": "", "MOST": 1.0, "FACTOR": "", "CLIP": 0.0}
    return {"RULE": rule.kind, "OVER": rule.over, "MOST": rule.largest, "FACTOR": rule.factor, "CLIP": rule.clip}


@triton.jit
def scale_of(norm, n, OVER: tl.constexpr, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scales, float32, of norms, float64, of blocks of n coordinates."""
    if OVER == "n":
        norm = norm / n
    elif OVER == "root n":
        norm = norm / tl.sqrt(n)
    elif OVER == "largest" and MOST != 1:
        norm = norm / MOST
    scale = norm.to(tl.float32)
    if OVER == "largest":
        scale = tl.where(scale < SMALLEST_NORMAL, 0.0, scale)  # NaN stays
    return scale


@triton.jit
def factor_of(scale, top, next_above, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Factors of the coordinates of blocks."""
    if FACTOR == "inverse":
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        return tl.where(inverse < float("inf"), inverse, 0.0)
    else:
        tl.static_assert(FACTOR == "levels")
        factor = tl.div_rn(top, scale)
        factor = tl.where(scale * factor < top, tl.div_rn(next_above, scale), factor)
        return tl.where(factor > LARGEST, LARGEST, factor)  # NaN stays


@triton.jit
def at_least(x, least):  # type: ignore[no-untyped-def]
    """Maximum that propagates NaN."""
    return tl.where(x < least, least, x)


@triton.jit
def means_of(sums, n):  # type: ignore[no-untyped-def]
    """Middle and half of blocks of n coordinates, from their sums."""
    high = at_least(sums[SUM] - sums[BELOW], 0.0) / at_least(n - sums[COUNT], 1.0)
    low = sums[BELOW] / at_least(sums[COUNT], 1.0)
    return ((high + low) / 2).to(tl.float32), ((high - low) / 2).to(tl.float32)


@triton.jit
def clipped_of(sums, n, CLIP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Largest magnitudes of blocks of n coordinates, clipped at CLIP standard deviations, from their sums."""
    square, constant = sums[L2] * sums[L2], sums[SUM] * sums[SUM] / n
    most = CLIP * tl.sqrt(at_least(square - constant, 0.0) / at_least(n - 1, 1.0))
    largest = tl.where(sums[LINF] > most, most, sums[LINF])
    return tl.where(constant < (1 - ROUNDING * (n + 9)) * square, largest, sums[LINF]).to(tl.float32)


@triton.jit
def _factors(scales, n, top, next_above, out, FACTOR: tl.constexpr, TOGETHER: tl.constexpr):  # type: ignore[no-untyped-def]
    b = tl.program_id(0) * TOGETHER + tl.arange(0, TOGETHER)
    scale = tl.load(scales + b, mask=b < n, other=1)
    tl.store(out + b, factor_of(scale, top, next_above, FACTOR), mask=b < n)
