"""Coordinates to which residuals are added as they are read, see `Fed`.

Their kernels get one table of addresses, int64 [2 W + 2, T]: of the coordinates of each worker, of their residuals, of
the rates, of the masks, whose address is 0 where there is none. Without residuals it has the first W rows.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors.kernels.dense_kernels import Coordinates
from accordion_bench.tensors.kernels.on_gpu.table import aligned
from accordion_bench.tensors.kernels.table import addresses
from accordion_bench.tensors.upload import upload

NOT, ADDED, WEIGHTED, RATED = (tl.constexpr(kind) for kind in range(4))  # how coordinates are fed


def told(x: Coordinates, there: torch.device) -> tuple[tuple[Tensor, float, float], dict[str, Any]]:
    """What kernels are told of coordinates: the table of addresses, weight and decay; and their constants."""
    fed = x.fed
    if fed is None:
        constants = {"ALIGNED": aligned(x.addresses, x.like.dtype), "FED": NOT.value, "DECAYED": False, "MASKED": False}
        return (upload(torch.from_numpy(x.addresses), there), 1.0, 1.0), constants
    masks = np.array([[0 if m is None else m.data_ptr() for m in fed.masks or [None] * len(x.rows_W)]], np.int64)
    rates = np.array([[rate.data_ptr() for rate in fed.rates or x.rows_W]], np.int64)
    residuals = addresses(fed.residuals_W)
    kind = RATED if fed.rates else ADDED if fed.weight == 1 else WEIGHTED
    constants = {
        "ALIGNED": all(aligned(own, x.like.dtype) for own in (x.addresses, residuals, masks)),
        "FED": kind.value,
        "DECAYED": fed.decay != 1,
        "MASKED": bool(masks.any()),
    }
    table = np.concatenate([x.addresses, residuals, rates, masks])
    return (upload(torch.from_numpy(table), there), float(fed.weight), float(fed.decay)), constants


@triton.jit
def row_at(addresses, row, T, t, TYPE: tl.constexpr, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where numbers of a tensor begin."""
    where = tl.load(addresses + row * T + t).to(tl.pointer_type(TYPE))
    return tl.multiple_of(where, 16 if ALIGNED else 4)


@triton.jit
def rate_of(addresses, W, T, t, TYPE: tl.constexpr, FED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tensor's rate; 1 where there is none."""
    if FED == RATED:
        return tl.load(tl.load(addresses + 2 * W * T + t).to(tl.pointer_type(TYPE)))
    else:
        return 1.0


@triton.jit
def fed_by(  # type: ignore[no-untyped-def]
    x, kept, weight, decay, rate, FED: tl.constexpr, DECAYED: tl.constexpr
):
    """p, rounded as torch rounds: a sum with a weight is one operation, one with a rate two."""
    if DECAYED:
        kept = kept * decay
    if FED == WEIGHTED:
        return tl.fma(x, tl.full(x.shape, weight, x.dtype), kept)
    elif FED == RATED:
        return kept + x * rate
    else:
        return kept + x
