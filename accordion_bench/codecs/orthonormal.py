"""Orthonormalisation: by QR for each matrix, or by Cholesky for many matrices in a few launches without a wait.

QR on a GPU launches kernels for each matrix. The other way pads X^T X of each matrix, r x r in float64, to the largest
r, and factors all in one batch. X times the inverse factor is orthonormal up to 1e-16 times the squared condition
number; a second pass removes this error.
"""

import functools
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from accordion_bench.tensors.upload import table

# share of the diagonal of X^T X that is added to it in the first pass: above rounding errors, so that a matrix of lower
# rank has a factor, too; a vector that is independent by less than a millionth comes out shorter, until the second pass
SHIFT = 1e-12
LAST_SHIFT = 1e-15
# what fills vectors that depend on others, between the passes, against 1: below the rounding of float32
FILL = 1e-8
TINY = 1e-300  # added to squared norms: a zero is divided by its root

Batches = Sequence[tuple[int, int, int]]
"""(G, r, n): G matrices of r vectors with n entries each."""


def orthonormal(flat: Tensor, batches: Batches, columns: bool = False, passes: int = 2) -> Tensor:
    """Orthonormalise vectors: the first j vectors keep their span, for every j; equal to QR up to signs.

    Dependent vectors are replaced by arbitrary ones; a single zero vector stays zero.

    Args:
        flat: all matrices, concatenated in the order of batches.
        batches: sizes of the batches.
        columns: whether vectors are the columns of matrices [n, r]; otherwise they are the rows of [r, n].
        passes: 2: orthonormal to 1e-9. 1: orthonormal to 1e-15 times the squared condition number, which is at most
            1e6; dependent vectors are shorter than 1.

    Returns:
        tensor with the shape of `flat`.
    """
    wide, longest = flat.double(), max(r * n for _, r, n in batches)
    for number in range(passes):
        given, found = list(vectors(wide, batches, columns)), torch.empty_like(wide)
        fill = fixed_numbers(longest, torch.float64, flat.device) if number + 1 < passes else None
        factors = _factors(given, SHIFT if number == 0 else LAST_SHIFT)
        for x, out, factor in zip(given, vectors(found, batches, columns), factors, strict=True):
            if fill is not None and x.shape[1] > 1:
                own = fill[: x[0].numel()].view(x[0].shape)
                torch.baddbmm(own, factor, x, beta=FILL / x.shape[2] ** 0.5, out=out)
            else:
                torch.bmm(factor, x, out=out)
        wide = found
    return wide.to(flat.dtype)


def vectors(flat: Tensor, batches: Batches, columns: bool) -> Iterator[Tensor]:
    """Yield the batches as rows [G, r, n]; views."""
    for part, (count, r, n) in zip(flat.split([count * r * n for count, r, n in batches]), batches, strict=True):
        yield part.view(count, n, r).mT if columns else part.view(count, r, n)


def _factors(given: Sequence[Tensor], shift: float) -> list[Tensor]:
    """Return lower triangular F [G, r, r] for each batch X [G, r, n], such that the rows of F X are orthonormal."""
    counts, widest = [len(x) for x in given], max(x.shape[1] for x in given)
    gram = given[0].new_zeros(sum(counts), widest, widest)
    for x, part in zip(given, gram.split(counts), strict=True):
        torch.bmm(x, x.mT, out=part[:, : x.shape[1], : x.shape[1]])
    gram.diagonal(dim1=1, dim2=2).mul_(1 + shift).add_(TINY)
    lower, _ = torch.linalg.cholesky_ex(gram)
    identity = torch.eye(widest, dtype=gram.dtype, device=gram.device)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    return [part[:, : x.shape[1], : x.shape[1]] for x, part in zip(given, inverse.split(counts), strict=True)]


@functools.lru_cache(maxsize=16)
def fixed_numbers(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return `count` numbers in [-1, 1] whose rows are linearly independent; cached."""
    numbers = torch.arange(1, count + 1, dtype=torch.float64).square_().sin_()
    return table(numbers.to(dtype), device)


def unit_columns(P: Tensor) -> Tensor:
    """Orthonormalise the columns of each matrix [G, n, r] by QR; a zero matrix yields finite columns."""
    if P.shape[-1] == 1:
        # scale to unit range first, because the squares of a tiny gradient underflow
        tiny = torch.finfo(P.dtype).tiny
        P = P / P.abs().amax(dim=(-2, -1), keepdim=True).clamp_min(tiny)
        return P / P.norm(dim=-2, keepdim=True).clamp_min(tiny)
    return torch.linalg.qr(P).Q


def unit_columns_batched(factors: Sequence[Tensor], passes: int = 2) -> list[Tensor]:
    """Orthonormalise the columns of several batches [G, n, r] by `orthonormal`; equal sizes form one batch."""
    order = sorted(range(len(factors)), key=lambda f: factors[f].shape[1:])
    in_rows = all(factor.mT.is_contiguous() for factor in factors)  # saves a copy
    flat = torch.cat([(factors[f].mT if in_rows else factors[f]).reshape(-1) for f in order])
    sizes = groupby(order, key=lambda f: factors[f].shape[1:])
    batches = [(sum(len(factors[f]) for f in some), r, n) for (n, r), some in sizes]
    parts = orthonormal(flat, batches, not in_rows, passes).split([factors[f].numel() for f in order])
    found = dict(zip(order, parts, strict=True))
    if in_rows:
        return [found[f].view(factor.mT.shape).mT for f, factor in enumerate(factors)]
    return [found[f].view(factor.shape) for f, factor in enumerate(factors)]
