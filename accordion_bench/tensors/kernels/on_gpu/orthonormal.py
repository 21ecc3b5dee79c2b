"""Orthonormalisation of the columns of many thin matrices on a GPU, by the method of `codecs.orthonormal`.

A program processes one matrix. Each pass reads the matrix again, because a thin matrix stays in the cache.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors.kernels.on_gpu.launch import TYPES, launch
from accordion_bench.tensors.kernels.on_gpu.products import empty_tensors
from accordion_bench.tensors.upload import upload

WARPS = 8
NUMBERS = 4096  # entries of all vectors per iteration of a program
GIVEN, ENTRY, VECTOR, N, RANK, OUT, OTHER, OTHER_ENTRY, OTHER_VECTOR, WIDTH = (
    tl.constexpr(column) for column in range(10)
)
"""Columns of a table: address of a matrix, its strides from entry to entry and from vector to vector, its entries and
vectors; address of the result; address of the replacement, and its strides; number of columns."""


class Numbers(NamedTuple):
    """Constants of `codecs.orthonormal`.

    shift, last_shift: relative increments of the diagonal in the first and in the last pass.
    tiny: absolute increment of the diagonal.
    fill: factor of the fixed numbers that are added between the passes.
    fixed: fixed numbers, float64.
    """

    shift: float
    last_shift: float
    tiny: float
    fill: float
    fixed: Tensor


def _table(factors: Sequence[Tensor], results: Sequence[Tensor], others: Sequence[Tensor]) -> np.ndarray:
    rows = []
    for X, out, other in zip(factors, results, others, strict=True):
        (G, n, r), size = X.shape, X.element_size()
        own, numbers = np.zeros((G, WIDTH.value), np.int64), np.arange(G)
        own[:, N.value], own[:, RANK.value] = n, r
        for column, x in ((GIVEN, X), (OTHER, other)):
            step = x.stride(0) if len(x) > 1 else 0
            own[:, column.value] = x.data_ptr() + numbers * (step * size)
            own[:, column.value + 1], own[:, column.value + 2] = x.stride(1), x.stride(2)
        own[:, OUT.value] = out.data_ptr() + numbers * (out.stride(0) * size)
        rows.append(own)
    return np.concatenate(rows)


def orthonormalise(factors: Sequence[Tensor], passes: int, numbers: Numbers) -> list[Tensor]:
    """See `Engine.orthonormalise`; results are transposed views of contiguous rows. One launch.

    Args:
        factors: batches [G, n, r] with r at most 8, so that X^T X fits into registers.
        passes: 1 or 2.
        numbers: constants.
    """
    found, there = empty_tensors([(len(X), X.shape[2], X.shape[1]) for X in factors], factors[0]), factors[0].device
    rows, highest = _table(factors, found, factors), max(X.shape[2] for X in factors)
    launch(
        _orthonormalise,
        (len(rows),),
        there,
        *(upload(torch.from_numpy(rows), there), numbers.fixed),
        TYPE=TYPES[factors[0].dtype],
        R=highest,
        PASSES=passes,
        BLOCK=NUMBERS // triton.next_power_of_2(highest) // (2 if highest > 4 else 1),  # in registers
        SHIFT=numbers.shift,
        LAST_SHIFT=numbers.last_shift,
        TINY=numbers.tiny,
        FILL=numbers.fill,
        num_warps=WARPS,
    )
    return [rows.mT for rows in found]


def replace_degenerate(news: Sequence[Tensor], olds: Sequence[Tensor]) -> list[Tensor]:
    """See `Engine.replace_degenerate`; results are contiguous. One launch."""
    found, there = empty_tensors([new.shape for new in news], news[0]), news[0].device
    rows = _table(news, found, olds)
    launch(
        _renew,
        (len(rows),),
        there,
        upload(torch.from_numpy(rows), there),
        TYPE=TYPES[news[0].dtype],
        BLOCK=NUMBERS,
        num_warps=WARPS,
    )
    return found


@triton.jit
def _vectors(x, entry, vector, c, n, r, R: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Entries of each vector in float64; 0 for missing vectors."""
    i = c + tl.arange(0, BLOCK)
    found = ()
    for k in tl.static_range(R):
        own = tl.load(x + k * vector + i.to(tl.int64) * entry, mask=i < tl.where(r > k, n, 0), other=0)
        found += (own.to(tl.float64),)  # type: ignore[assignment]
    return found


@triton.jit
def _combined(xs, factor, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Products of vectors with a lower triangular factor."""
    found = ()
    for i in tl.static_range(R):
        total = xs[0] * factor[i * (i + 1) // 2]
        for j in tl.static_range(1, i + 1):
            total += xs[j] * factor[i * (i + 1) // 2 + j]
        found += (total,)  # type: ignore[assignment]
    return found


@triton.jit
def _filled(xs, fixed, scale, c, n, r, R: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Vectors plus scaled fixed numbers."""
    i = c + tl.arange(0, BLOCK)
    found = ()
    for k in tl.static_range(R):
        own = tl.load(fixed + k * n + i, mask=i < tl.where(r > k, n, 0), other=0)
        found += (xs[k] + own * scale,)  # type: ignore[assignment]
    return found


@triton.jit
def _none(R: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zeros for each pair of vectors."""
    found = ()
    for _ in tl.static_range(R * (R + 1) // 2):
        found += (tl.zeros([BLOCK], tl.float64),)  # type: ignore[assignment]
    return found


@triton.jit
def _with_products(sums, xs, R: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums plus the products of each pair of vectors."""
    found = ()
    for i in tl.static_range(R):
        for j in tl.static_range(i + 1):
            found += (sums[i * (i + 1) // 2 + j] + xs[i] * xs[j],)  # type: ignore[assignment]
    return found


@triton.jit
def _inverse_factor(sums, R: tl.constexpr, SHIFT: tl.constexpr, TINY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Inverse of the Cholesky factor of X X^T, lower triangular."""
    lower = ()
    for i in tl.static_range(R):
        for j in tl.static_range(i + 1):
            total = tl.sum(sums[i * (i + 1) // 2 + j], axis=0)
            if i == j:
                total = total * (1 + SHIFT) + TINY
            for k in tl.static_range(j):
                total -= lower[i * (i + 1) // 2 + k] * lower[j * (j + 1) // 2 + k]
            if i == j:
                lower += (tl.sqrt(total),)  # type: ignore[assignment]
            else:
                lower += (total / lower[j * (j + 1) // 2 + j],)  # type: ignore[assignment]
    inverse = ()
    for i in tl.static_range(R):
        for j in tl.static_range(i):
            total = lower[i * (i + 1) // 2 + j] * inverse[j * (j + 1) // 2 + j]
            for k in tl.static_range(j + 1, i):
                total += lower[i * (i + 1) // 2 + k] * inverse[k * (k + 1) // 2 + j]
            inverse += (-total / lower[i * (i + 1) // 2 + i],)  # type: ignore[assignment]
        inverse += (1.0 / lower[i * (i + 1) // 2 + i],)  # type: ignore[assignment]
    return inverse


@triton.jit
def _orthonormalise(  # type: ignore[no-untyped-def]
    table, fixed, TYPE: tl.constexpr, R: tl.constexpr, PASSES: tl.constexpr, BLOCK: tl.constexpr,
    SHIFT: tl.constexpr, LAST_SHIFT: tl.constexpr, TINY: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    row = table + tl.program_id(0) * WIDTH
    x, out = tl.load(row + GIVEN).to(tl.pointer_type(TYPE)), tl.load(row + OUT).to(tl.pointer_type(TYPE))
    entry, vector = tl.load(row + ENTRY), tl.load(row + VECTOR)
    n, r = tl.load(row + N).to(tl.int32), tl.load(row + RANK).to(tl.int32)
    scale = tl.where(r > 1, FILL / tl.sqrt(n.to(tl.float64)), 0.0)
    sums = _none(R, BLOCK)
    for c in range(0, n, BLOCK):
        sums = _with_products(sums, _vectors(x, entry, vector, c, n, r, R, BLOCK), R)
    first = _inverse_factor(sums, R, SHIFT, TINY)
    second = first
    if PASSES > 1:
        sums = _none(R, BLOCK)
        for c in range(0, n, BLOCK):
            xs = _combined(_vectors(x, entry, vector, c, n, r, R, BLOCK), first, R)
            sums = _with_products(sums, _filled(xs, fixed, scale, c, n, r, R, BLOCK), R)
        second = _inverse_factor(sums, R, LAST_SHIFT, TINY)
    for c in range(0, n, BLOCK):
        xs = _combined(_vectors(x, entry, vector, c, n, r, R, BLOCK), first, R)
        if PASSES > 1:
            xs = _combined(_filled(xs, fixed, scale, c, n, r, R, BLOCK), second, R)
        i = c + tl.arange(0, BLOCK)
        for k in tl.static_range(R):
            tl.store(out + k * n + i, xs[k].to(TYPE), mask=i < tl.where(r > k, n, 0))


@triton.jit
def _renew(table, TYPE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = table + tl.program_id(0) * WIDTH
    new, old = tl.load(row + GIVEN).to(tl.pointer_type(TYPE)), tl.load(row + OTHER).to(tl.pointer_type(TYPE))
    out = tl.load(row + OUT).to(tl.pointer_type(TYPE))
    n, r = tl.load(row + N).to(tl.int32), tl.load(row + RANK).to(tl.int32)
    entry, vector = tl.load(row + ENTRY), tl.load(row + VECTOR)
    others, nothing = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for k in range(0, r):
        for c in range(0, n, BLOCK):
            i = c + tl.arange(0, BLOCK)
            x = tl.load(new + k * vector + i.to(tl.int64) * entry, mask=i < n, other=0)
            others |= (x != 0).to(tl.int32)
            nothing |= (x != x).to(tl.int32)
    alive = (tl.max(others, axis=0) > 0) & (tl.max(nothing, axis=0) == 0)
    if not alive:
        new, entry, vector = old, tl.load(row + OTHER_ENTRY), tl.load(row + OTHER_VECTOR)
    for k in range(0, r):
        for c in range(0, n, BLOCK):
            i = c + tl.arange(0, BLOCK)
            x = tl.load(new + k * vector + i.to(tl.int64) * entry, mask=i < n, other=0)
            tl.store(out + i.to(tl.int64) * r + k, x, mask=i < n)
