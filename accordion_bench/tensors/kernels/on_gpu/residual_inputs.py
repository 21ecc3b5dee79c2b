"""Reads of coordinates with residuals, see `ResidualInputs`.

Kernels receive one table of addresses, int64 [2 W + 3, T]: coordinates of each worker, residuals of each worker, rates,
masks and momenta; 0 = none. Without residuals the table has the first W rows only.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors.kernels.dense_kernels import Coordinates
from accordion_bench.tensors.kernels.on_gpu.launch import aligned

NOT, ADDED, WEIGHTED, RATED = (tl.constexpr(kind) for kind in range(4))  # how coordinates are fed


def told(x: Coordinates) -> tuple[tuple[Tensor, float, float, float], dict[str, Any]]:
    """Return the arguments (table of addresses, weight, decay, momentum) and the constants of kernels."""
    fed, kind = x.fed, NOT
    numbers = (1.0, 1.0, 0.0) if fed is None else (float(fed.weight), float(fed.decay), float(fed.momentum))
    weight, decay, _ = numbers
    if fed is not None:
        kind = RATED if fed.rates else ADDED if weight == 1 else WEIGHTED
    W = len(x.addresses)
    aligned_too = [x.addresses, x.fed_addresses[:W], x.fed_addresses[W + 1 :]]  # a rate is one number
    constants = {
        "ALIGNED": all(aligned(own, x.like.dtype) for own in aligned_too),
        "FED": kind.value,
        "DECAYED": decay != 1,
        "MASKED": bool(x.fed_addresses[W + 1 : W + 2].any()),
        "LED": bool(x.fed_addresses[W + 2 :].any()),
    }
    return (x.on_device, *numbers), constants


@triton.jit
def row_at(addresses, row, T, t, TYPE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Address of a row of the table of addresses."""
    where = tl.load(addresses + row * T + t).to(tl.pointer_type(TYPE))
    return tl.multiple_of(where, 16 if ALIGNED else 4)


@triton.jit
def rate_of(addresses, W, T, t, TYPE: tl.constexpr, FED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rate of a tensor; 1 without rates."""
    if FED == RATED:
        return tl.load(tl.load(addresses + 2 * W * T + t).to(tl.pointer_type(TYPE)))
    else:
        return 1.0


@triton.jit
def with_residuals(  # type: ignore[no-untyped-def]
    x, kept, u, weight, decay, momentum, rate, FED: tl.constexpr, DECAYED: tl.constexpr, LED: tl.constexpr
):
    """p, rounded as by torch: a weight is fused with the sum, a rate is not; `u` is used if LED."""
    if DECAYED:
        kept = kept * decay
    if LED:
        kept = tl.fma(u, tl.full(u.shape, momentum, u.dtype), kept)
    if FED == WEIGHTED:
        return tl.fma(x, tl.full(x.shape, weight, x.dtype), kept)
    elif FED == RATED:
        return kept + x * rate
    else:
        return kept + x
