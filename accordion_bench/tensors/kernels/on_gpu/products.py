"""Products of many matrices with thin factors on a GPU, with one read or write of each matrix.

For a matrix M [n, m] with rows L [r, n] and R [r, m], kernels compute L = (M R^T)^T, R = L M, and M = L^T R. The first
two can add a matrix to M in their read and write the sum. Partial sums cover fixed spans and are added in a fixed
order, so results depend neither on the number of workers nor on the address of a matrix.

Tensor suffixes: W local workers, G matrices of one size.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors.kernels.on_gpu.launch import KEPT, TYPES, launch
from accordion_bench.tensors.upload import table, upload

HIGHEST = 8  # rank; of 16, torch is faster on large matrices
LARGEST = 1 << 24  # side of a matrix: numbers of a tile are counted in 32 bits
WARPS = 8
TALL, WIDE = tl.constexpr(32), tl.constexpr(128)  # a tile of a matrix: four loads of each thread
GROUP = tl.constexpr(4)  # coordinates that a thread loads at once
SPAN_OF_ROWS, SPAN_OF_COLUMNS = 256, 1024  # of a part of a sum
TOGETHER = tl.constexpr(128)  # sums of a program that joins parts
SLOTS = tl.constexpr(16)  # parts at a time
EDGE = 32  # results begin at multiples of so many numbers

MATRIX, STEP, STRIDE, ROWS, COLUMNS, LEFT, LEFT_STEP, RIGHT, RIGHT_STEP, RANK, ALIGNED, TERM, TERM_STEP, TERM_STRIDE = (
    tl.constexpr(column) for column in range(14)
)
"""Columns of a table: address of a matrix, its distances between workers and between rows, its rows and columns; the
addresses of L and R, each with its distance between workers; rank; whether 16 bytes can be loaded at once; address and
distances of the matrix that is added. Distances count numbers."""
WIDTH = tl.constexpr(14)
SIZE, PARTS, JOINED = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
"""The same of sums: where parts are, from worker to worker, where the sum is, from worker to worker, numbers, parts."""


class ProductBatch(NamedTuple):
    """Matrices of one size and their factors.

    matrices_W: M [W, G, n, m], with contiguous rows.
    lefts_W: L [W, G, r, n], each contiguous.
    rights_W: R [W, G, r, m], each contiguous.
    terms_W: G matrices [W, n, m] with contiguous rows, which are added to M in place; empty = none.
    """

    matrices_W: Tensor
    lefts_W: Tensor
    rights_W: Tensor
    terms_W: Sequence[Tensor] = ()

    @property
    def rank(self) -> int:
        """r."""
        return self.lefts_W.shape[2]

    def rows(self) -> np.ndarray:
        """Return the rows of the table of kernels, int64 [G, WIDTH]."""
        (W, G, n, m), size = self.matrices_W.shape, self.matrices_W.element_size()
        rows, numbers = np.zeros((G, WIDTH.value), np.int64), np.arange(G)
        columns = ((MATRIX, STEP), (LEFT, LEFT_STEP), (RIGHT, RIGHT_STEP))
        for x_W, (where, step) in zip(self[:3], columns, strict=True):
            rows[:, where.value] = x_W.data_ptr() + numbers * (x_W.stride(1) * size)
            rows[:, step.value] = x_W.stride(0)
        stride = self.matrices_W.stride(2) if n > 1 else m
        shape = {STRIDE: stride, ROWS: n, COLUMNS: m, RANK: self.rank}
        for column, number in shape.items():
            rows[:, column.value] = number
        steps = [m, stride] + [self.matrices_W.stride(0)] * (W > 1)
        even = all(step % GROUP.value == 0 for step in steps)
        rows[:, ALIGNED.value] = (rows[:, MATRIX.value] % 16 == 0) & even
        for row, x_W in zip(rows, self.terms_W, strict=False):
            stride = x_W.stride(1) if n > 1 else m
            row[TERM.value : TERM_STRIDE.value + 1] = x_W.data_ptr(), x_W.stride(0), stride
            even = all(step % GROUP.value == 0 for step in [stride] + [x_W.stride(0)] * (W > 1))
            row[ALIGNED.value] &= (x_W.data_ptr() % 16 == 0) & even
        return rows


def fits(shapes: Sequence[Sequence[int]], ranks: Sequence[int]) -> bool:
    """Return whether kernels support matrices [..., n, m] with factors of these ranks."""
    return bool(shapes) and max(ranks) <= HIGHEST and max(side for shape in shapes for side in shape[-2:]) < LARGEST


def in_rows(factors: Tensor) -> Tensor:
    """Return columns [..., n, r] as contiguous rows [..., r, n]; a view if possible."""
    rows = factors.mT
    apart = rows.stride(-1) != 1 or rows.stride(-2) != rows.shape[-1]
    return rows.contiguous() if apart else rows


def empty_tensors(shapes: Sequence[Sequence[int]], like: Tensor) -> list[Tensor]:
    """Return uninitialised tensors in one allocation."""
    sizes = [-(-int(np.prod(shape)) // EDGE) * EDGE for shape in shapes]
    parts = torch.empty(sum(sizes), dtype=like.dtype, device=like.device).split(sizes)
    return [part[: int(np.prod(shape))].view(*shape) for part, shape in zip(parts, shapes, strict=True)]


def multiply(
    matrices_W: Sequence[Tensor], factors: Sequence[Tensor], terms_W: Sequence[Sequence[Tensor]] = ()
) -> list[Tensor]:
    """See `Engine.multiply`. One launch; one more for partial sums, one more if only some matrices are transposed.

    With terms, the rows or the columns of each M must be contiguous.
    """
    shapes = [(*M_W.shape[:2], F.shape[2], M_W.shape[2]) for M_W, F in zip(matrices_W, factors, strict=True)]
    found = empty_tensors(shapes, matrices_W[0])
    lying: list[ProductBatch] = []
    standing: list[ProductBatch] = []
    terms_W = terms_W or [()] * len(found)
    for M_W, F, out_W, added_W in zip(matrices_W, factors, found, terms_W, strict=True):
        F_W = in_rows(F).expand(len(M_W), -1, -1, -1)
        if M_W.stride(3) != 1 and M_W.stride(2) == 1:
            standing.append(ProductBatch(M_W.mT, F_W, out_W, [with_rows(x_W.mT) for x_W in added_W]))
        else:
            lying.append(ProductBatch(with_rows(M_W), out_W, F_W, [with_rows(x_W) for x_W in added_W]))
    sums = [*_multiplied(_times_right, lying, LEFT.value), *_multiplied(_times_left, standing, RIGHT.value)]
    _join(sums, matrices_W[0])
    return found


def with_rows(matrices: Tensor) -> Tensor:
    """Return matrices [..., n, m] with contiguous rows; a copy if theirs are not."""
    return matrices if matrices.stride(-1) == 1 else matrices.contiguous()


class Sums(NamedTuple):
    """Partial sums parts_W [W, G, parts, numbers], and the sums [W, G, ...]."""

    parts_W: Tensor
    sums_W: Tensor


def _multiplied(kernel: triton.JITFunction, batches: Sequence[ProductBatch], column: int) -> list[Sums]:
    """Compute one side of batches; return the partial sums to add.

    Args:
        kernel: `_times_right`, which computes the left side, or `_times_left`.
        batches: matrices and factors.
        column: column of the table with the address of that side.
    """
    if not batches:
        return []
    like, left = batches[0].matrices_W, column == LEFT.value
    spans = (TALL.value, SPAN_OF_COLUMNS) if left else (SPAN_OF_ROWS, WIDE.value)
    span, axis = (SPAN_OF_COLUMNS, 3) if left else (SPAN_OF_ROWS, 2)
    split = [-(-batch.matrices_W.shape[axis] // span) for batch in batches]
    sides = [b.lefts_W if left else b.rights_W for b in batches]
    many = [number for number, parts in enumerate(split) if parts > 1]
    places = (
        empty_tensors([(*sides[b].shape[:2], split[b], sides[b][0, 0].numel()) for b in many], like) if many else []
    )
    sums = [Sums(place, sides[b]) for b, place in zip(many, places, strict=True)]
    tables = [batch.rows() for batch in batches]
    for b, place in zip(many, places, strict=True):
        tables[b][:, column] = place.data_ptr() + np.arange(place.shape[1]) * (place.stride(1) * place.element_size())
        tables[b][:, column + 1] = place.stride(0)
    _start(kernel, batches, np.concatenate(tables), spans, SPAN=span, ADDS=bool(batches[0].terms_W))
    return sums


def fill(batches: Sequence[ProductBatch]) -> None:
    """M <- L^T R. One launch."""
    _start_outer(batches, 1.0, False)


def subtract(batches: Sequence[ProductBatch], alpha: float) -> None:
    """M <- M - alpha L^T R. One launch."""
    _start_outer(batches, alpha, True)


def _start_outer(batches: Sequence[ProductBatch], alpha: float, subtracts: bool) -> None:
    tables, spans = np.concatenate([batch.rows() for batch in batches]), (SPAN_OF_ROWS, WIDE.value)
    _start(_outer, batches, tables, spans, float(alpha), SPAN=SPAN_OF_ROWS, SUBTRACTS=subtracts)


def _start(
    kernel: triton.JITFunction,
    batches: Sequence[ProductBatch],
    rows: np.ndarray,
    spans: tuple[int, int],
    *args: float,
    **constants: int,
) -> None:
    like = batches[0].matrices_W
    there, sizes = like.device, tuple(map(tuple, rows[:, ROWS.value : COLUMNS.value + 1].tolist()))
    pieces = pieces_on(sizes, spans, there)
    launch(
        kernel,
        (len(pieces), len(like)),
        there,
        *(upload(torch.from_numpy(rows), there), pieces, *args),
        TYPE=TYPES[like.dtype],
        R=max(batch.rank for batch in batches),
        **constants,
        num_warps=WARPS,
    )


@functools.lru_cache(maxsize=KEPT)
def pieces_on(sizes: tuple[tuple[int, int], ...], spans: tuple[int, int], device: torch.device) -> Tensor:
    """Return pieces of matrices with `spans` rows and columns, int32 [programs, 3]: matrix, first row and column."""
    found = []
    for t, (n, m) in enumerate(sizes):
        i, j = np.meshgrid(np.arange(0, n, spans[0]), np.arange(0, m, spans[1]), indexing="ij")
        found.append(np.stack([np.full(i.size, t), i.ravel(), j.ravel()], axis=1))
    return table(torch.from_numpy(np.concatenate(found).astype(np.int32)), device)


def _join(sums: Sequence[Sums], like: Tensor) -> None:
    rows = []
    for parts_W, sums_W in sums:
        numbers, size = np.arange(parts_W.shape[1]), parts_W.element_size()
        own = np.zeros((len(numbers), JOINED.value), np.int64)
        for column, x_W in ((0, parts_W), (2, sums_W)):
            own[:, column] = x_W.data_ptr() + numbers * (x_W.stride(1) * size)
            own[:, column + 1] = x_W.stride(0)
        own[:, SIZE.value], own[:, PARTS.value] = parts_W.shape[3], parts_W.shape[2]
        rows.append(own)
    if not rows:
        return
    joined, there = np.concatenate(rows), like.device
    pieces = pieces_on(tuple((1, size) for size in joined[:, SIZE.value].tolist()), (1, TOGETHER.value), there)
    launch(
        _join_parts,
        (len(pieces), len(like)),
        there,
        *(upload(torch.from_numpy(joined), there), pieces),
        TYPE=TYPES[like.dtype],
    )


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    matrix, at, stride, rows, columns, TYPE: tl.constexpr, EVEN: tl.constexpr
):
    """Offsets of the elements of a tile [TALL, WIDE] of a matrix, and which exist."""
    i, j, first = tl.arange(0, TALL), tl.arange(0, WIDE), matrix.to(tl.pointer_type(TYPE)) + at
    if EVEN:  # the same numbers; the compiler sees that they are multiples of 4
        first, stride, columns = tl.multiple_of(first, 16), (stride >> 2) * 4, (columns >> 2) * 4
    return (first + i.to(tl.int64) * stride)[:, None] + j[None], (i < rows)[:, None] & (j < columns)[None]


@triton.jit
def _load_tile(  # type: ignore[no-untyped-def]
    matrix, at, stride, term, term_at, term_stride, rows, columns, even, TYPE: tl.constexpr, ADDS: tl.constexpr
):
    """Read a tile, with 0 for missing elements. The assignment of elements to threads does not depend on alignment.

    If ADDS and 16 bytes can be loaded at once, add the tile of the term and write the sum to the matrix.
    """
    if even != 0:
        where, exists = _tile(matrix, at, stride, rows, columns, TYPE, True)
        x = tl.load(where, mask=exists, other=0)
        if ADDS:
            added, _ = _tile(term, term_at, term_stride, rows, columns, TYPE, True)
            x += tl.load(added, mask=exists, other=0)
            tl.store(where, x, mask=exists)
    else:
        where, exists = _tile(matrix, at, stride, rows, columns, TYPE, False)
        x = tl.load(where, mask=exists, other=0)
    return x


@triton.jit
def _add_narrow(  # type: ignore[no-untyped-def]
    matrix, at, stride, term, term_at, term_stride, rows, columns, even, TYPE: tl.constexpr
):
    """Add the term to a piece of a matrix if 16 bytes cannot be loaded at once.

    A pass of its own: with a second assignment of elements to threads, the loop of the product took 179 registers.
    """
    if even == 0:
        i, j, to = tl.arange(0, 8)[:, None], tl.arange(0, WIDE)[None, :], matrix.to(tl.pointer_type(TYPE)) + at
        added = term.to(tl.pointer_type(TYPE)) + term_at
        for top in range(0, rows, 8):
            for begin in range(0, columns, WIDE):
                exists, row = (top + i < rows) & (begin + j < columns), (top + i).to(tl.int64)
                where = to + row * stride + begin + j
                total = tl.load(where, mask=exists, other=0) + tl.load(
                    added + row * term_stride + begin + j, mask=exists, other=0
                )
                tl.store(where, total, mask=exists)
        tl.debug_barrier()  # other threads read what this one has written


@triton.jit
def _piece_of(table, pieces):  # type: ignore[no-untyped-def]
    """Row of a program in the table, first row and column; rows, columns and rank of its matrix."""
    piece = pieces + 3 * tl.program_id(0)
    row = table + tl.load(piece) * WIDTH
    n, m = tl.load(row + ROWS).to(tl.int32), tl.load(row + COLUMNS).to(tl.int32)
    return row, tl.load(piece + 1), tl.load(piece + 2), n, m, tl.load(row + RANK).to(tl.int32)


@triton.jit
def _side(row, WHERE: tl.constexpr, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Address of L or R of a worker."""
    return tl.load(row + WHERE).to(tl.pointer_type(TYPE)) + tl.program_id(1).to(tl.int64) * tl.load(row + WHERE + 1)


@triton.jit
def _term(row, ADDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Address of the matrix that is added, offset of a worker in it, numbers from row to row; zeros without one."""
    term, offset, stride = tl.cast(0, tl.int64), tl.cast(0, tl.int64), tl.cast(0, tl.int32)
    if ADDS:
        term, stride = tl.load(row + TERM), tl.load(row + TERM_STRIDE).to(tl.int32)
        offset = tl.program_id(1).to(tl.int64) * tl.load(row + TERM_STEP)
    return term, offset, stride


@triton.jit
def _times_right(  # type: ignore[no-untyped-def]
    table, pieces, TYPE: tl.constexpr, R: tl.constexpr, SPAN: tl.constexpr, ADDS: tl.constexpr
):
    row, first, begin, n, m, r = _piece_of(table, pieces)
    matrix, stride, aligned = tl.load(row + MATRIX), tl.load(row + STRIDE).to(tl.int32), tl.load(row + ALIGNED)
    right = _side(row, RIGHT, TYPE)
    at = tl.program_id(1).to(tl.int64) * tl.load(row + STEP) + first.to(tl.int64) * stride
    term, term_at, term_stride = _term(row, ADDS)
    term_at += first.to(tl.int64) * term_stride
    if ADDS:
        tall, wide = tl.minimum(n - first, TALL), tl.minimum(m - begin, SPAN)
        _add_narrow(matrix, at + begin, stride, term, term_at + begin, term_stride, tall, wide, aligned, TYPE)
    j = tl.arange(0, WIDE // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    sums = ()
    for _ in tl.static_range(R):
        sums += (tl.zeros([TALL, WIDE // GROUP], TYPE),)  # type: ignore[assignment]
    for c in range(begin, tl.minimum(begin + SPAN, m), WIDE):
        x = _load_tile(matrix, at + c, stride, term, term_at + c, term_stride, n - first, m - c, aligned, TYPE, ADDS)
        x = tl.reshape(x, [TALL, WIDE // GROUP, GROUP])
        more = ()
        for k in tl.static_range(R):
            own = tl.load(right + k * m + c + j, mask=j < tl.where(r > k, m - c, 0), other=0)
            more += (sums[k] + tl.sum(x * own[None], axis=2),)  # type: ignore[assignment]
        sums = more
    i = first + tl.arange(0, TALL)
    out = _side(row, LEFT, TYPE) + (begin // SPAN).to(tl.int64) * r * n
    for k in tl.static_range(R):
        tl.store(out + k * n + i, tl.sum(sums[k], axis=1), mask=i < tl.where(r > k, n, 0))


@triton.jit
def _times_left(  # type: ignore[no-untyped-def]
    table, pieces, TYPE: tl.constexpr, R: tl.constexpr, SPAN: tl.constexpr, ADDS: tl.constexpr
):
    TIMES: tl.constexpr = 8  # warps: each has a row of a tile, and the next one after so many
    row, first, begin, n, m, r = _piece_of(table, pieces)
    matrix, stride, aligned = tl.load(row + MATRIX), tl.load(row + STRIDE).to(tl.int32), tl.load(row + ALIGNED)
    left = _side(row, LEFT, TYPE)
    at = tl.program_id(1).to(tl.int64) * tl.load(row + STEP) + begin
    term, term_at, term_stride = _term(row, ADDS)
    if ADDS:
        tall, wide, narrow_at = tl.minimum(n - first, SPAN), tl.minimum(m - begin, WIDE), first.to(tl.int64)
        to, added = at + narrow_at * stride, term_at + begin + narrow_at * term_stride
        _add_narrow(matrix, to, stride, term, added, term_stride, tall, wide, aligned, TYPE)
    i = tl.arange(0, TALL // TIMES)[:, None] * TIMES + tl.arange(0, TIMES)[None, :]
    sums = ()
    for _ in tl.static_range(R):
        sums += (tl.zeros([TIMES, WIDE], TYPE),)  # type: ignore[assignment]
    for top in range(first, tl.minimum(first + SPAN, n), TALL):
        here, there = at + tl.cast(top, tl.int64) * stride, term_at + begin + tl.cast(top, tl.int64) * term_stride
        x = _load_tile(matrix, here, stride, term, there, term_stride, n - top, m - begin, aligned, TYPE, ADDS)
        x = tl.reshape(x, [TALL // TIMES, TIMES, WIDE])
        more = ()
        for k in tl.static_range(R):
            own = tl.load(left + k * n + top + i, mask=i < tl.where(r > k, n - top, 0), other=0)
            more += (sums[k] + tl.sum(x * own[:, :, None], axis=0),)  # type: ignore[assignment]
        sums = more
    j = begin + tl.arange(0, WIDE)
    out = _side(row, RIGHT, TYPE) + (first // SPAN).to(tl.int64) * r * m
    for k in tl.static_range(R):
        tl.store(out + k * m + j, tl.sum(sums[k], axis=0), mask=j < tl.where(r > k, m, 0))


@triton.jit
def _outer(  # type: ignore[no-untyped-def]
    table, pieces, alpha, TYPE: tl.constexpr, R: tl.constexpr, SPAN: tl.constexpr,
    SUBTRACTS: tl.constexpr,
):  # fmt: skip
    row, first, begin, n, m, r = _piece_of(table, pieces)
    if tl.load(row + ALIGNED) != 0:
        _outer_of(row, first, begin, n, m, r, alpha, TYPE, R, SPAN, SUBTRACTS, True)
    else:
        _outer_of(row, first, begin, n, m, r, alpha, TYPE, R, SPAN, SUBTRACTS, False)


@triton.jit
def _outer_of(  # type: ignore[no-untyped-def]
    row, first, begin, n, m, r, alpha, TYPE: tl.constexpr, R: tl.constexpr, SPAN: tl.constexpr,
    SUBTRACTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    matrix, stride = tl.load(row + MATRIX), tl.load(row + STRIDE).to(tl.int32)
    left, right = _side(row, LEFT, TYPE), _side(row, RIGHT, TYPE)
    at = tl.program_id(1).to(tl.int64) * tl.load(row + STEP) + begin
    j = tl.arange(0, WIDE)
    rights = ()
    for k in tl.static_range(R):
        rights += (tl.load(right + k * m + begin + j, mask=j < tl.where(r > k, m - begin, 0), other=0),)  # type: ignore[assignment]
    for top in range(first, tl.minimum(first + SPAN, n), TALL):
        i = top + tl.arange(0, TALL)
        total = tl.zeros([TALL, WIDE], TYPE)
        for k in tl.static_range(R):
            total += tl.load(left + k * n + i, mask=i < tl.where(r > k, n, 0), other=0)[:, None] * rights[k][None]
        here = at + tl.cast(top, tl.int64) * stride
        where, exists = _tile(matrix, here, stride, n - top, m - begin, TYPE, EVEN)
        if SUBTRACTS:
            total = tl.load(where, mask=exists, other=0) - total * alpha
        tl.store(where, total, mask=exists)


@triton.jit
def _join_parts(table, pieces, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    piece, w = pieces + 3 * tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = table + tl.load(piece) * JOINED
    size, count = tl.load(row + SIZE).to(tl.int32), tl.load(row + PARTS).to(tl.int32)
    e, s = tl.load(piece + 2) + tl.arange(0, TOGETHER), tl.arange(0, SLOTS)
    parts = tl.load(row).to(tl.pointer_type(TYPE)) + w * tl.load(row + 1)
    total = tl.zeros([TOGETHER], TYPE)
    for begin in range(0, count, SLOTS):
        own = parts + (begin + s).to(tl.int64)[:, None] * size + e[None]
        total += tl.sum(tl.load(own, mask=(begin + s < count)[:, None] & (e < size)[None], other=0), axis=0)
    tl.store(tl.load(row + 2).to(tl.pointer_type(TYPE)) + w * tl.load(row + 3) + e, total, mask=e < size)
