"""Operations on matrices and thin factors in plain torch, and orthonormalisation of many matrices without a wait.

QR on a GPU launches kernels for each matrix. `orthonormal` pads X^T X of each matrix, r x r in float64, to the largest
r, and factors all in one batch. X times the inverse factor is orthonormal up to 1e-16 times the squared condition
number; a second pass removes this error.

Tensor suffixes: W local workers.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from accordion_bench.tensors.same_shape import as_matrices
from accordion_bench.tensors.upload import table

# share of the diagonal of X^T X that is added to it in the first pass: above rounding errors, so that a matrix of lower
# rank has a factor, too; a vector that is independent by less than a millionth comes out shorter, until the second pass
SHIFT = 1e-12
LAST_SHIFT = 1e-15
# what fills vectors that depend on others, between the passes, against 1: below the rounding of float32
FILL = 1e-8
TINY = 1e-300  # added to squared norms: a zero is divided by its root

# of the Newton-Schulz iteration
PRECISIONS = {None: None, "bfloat16": torch.bfloat16}  # dtype of the products, by option value
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7  # matrices with a smaller norm are not scaled to norm 1

Batches = Sequence[tuple[int, int, int]]
"""(G, r, n): G matrices of r vectors with n entries each."""


class MatrixOperations:
    """Operations of an engine on matrices and their factors, one batch at a time.

    Class attributes:
        copies: whether concatenating tensors is cheaper than an operation on each tensor.
    """

    copies: bool = False

    def orthonormalise(self, factors: Sequence[Tensor], passes: int = 2) -> list[Tensor]:
        """Orthonormalise the columns of matrices [G, n, r]: the first j columns keep their span, for every j.

        A zero matrix yields finite columns.

        Args:
            factors: batches of matrices.
            passes: 2; or 1 if only the span matters, which is faster on a GPU.
        """
        return [unit_columns(factor) for factor in factors]

    def multiply(
        self, matrices_W: Sequence[Tensor], factors: Sequence[Tensor], terms_W: Sequence[Sequence[Tensor]] = ()
    ) -> list[Tensor]:
        """Return the products M F of each batch as rows, (M F)^T [W, G, r, n]; with terms T, first M <- M + T in place.

        Sums are equal within rounding and do not depend on the number of workers.

        Args:
            matrices_W: batches of M [W, G, n, m]; transposed views are allowed.
            factors: F [G, m, r] of each batch.
            terms_W: T of each batch, as G matrices [W, n, m] of the dtype of M; empty = no terms.
        """
        if terms_W:
            sums_W = [M_W for matrices in matrices_W for M_W in matrices.unbind(1)]
            torch._foreach_add_(sums_W, [T_W for own_W in terms_W for T_W in own_W])
        # factors as rows, because products with two columns are 3 to 5 times slower in MKL
        return [F.mT @ M_W.mT for M_W, F in zip(matrices_W, factors, strict=True)]

    def products(self, lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> list[Tensor]:
        """Return the products L R [G, n, m] of each batch of L [G, n, r] and R [G, r, m]."""
        return [left @ right for left, right in zip(lefts, rights, strict=True)]

    def subtract_products(
        self,
        targets_W: Sequence[Mapping[int, Tensor]],
        lefts_W: Sequence[Tensor],
        rights_W: Sequence[Tensor],
        alpha: float = 1.0,
    ) -> None:
        """Subtract alpha L R from the matrices of each batch in place.

        Args:
            targets_W: contiguous tensors [W, ...] with the matrices, by index in the batch; some may be missing.
            lefts_W: L [W, G, n, r] of each batch.
            rights_W: R [W, G, r, m].
            alpha: factor.
        """
        for own_W, left_W, right_W in zip(targets_W, lefts_W, rights_W, strict=True):
            W, G, n, m = *left_W.shape[:3], right_W.shape[3]
            whole = len(own_W) == G > 1
            together = as_matrices(list(own_W.values()), (n, m)) if whole else None
            if together is not None:
                together.baddbmm_(left_W.reshape(W * G, n, -1), right_W.reshape(W * G, -1, m), alpha=-alpha)
            elif whole and self.copies:
                products = (left_W @ right_W).unbind(1)
                torch._foreach_sub_([x_W.view(W, n, m) for x_W in own_W.values()], list(products), alpha=alpha)
            else:
                for g, target_W in own_W.items():
                    target_W.view(W, n, m).baddbmm_(left_W[:, g], right_W[:, g], alpha=-alpha)

    def replace_degenerate(self, news: Sequence[Tensor], olds: Sequence[Tensor]) -> list[Tensor]:
        """Return the new matrices [G, n, r], or the old ones [G or 1, n, r] where a new one is zero or contains NaN."""
        if not news:
            return []
        largest = torch.stack(torch._foreach_norm([new for own in news for new in own], torch.inf))
        alive = (largest > 0).split([len(own) for own in news])  # NaN is not
        return [torch.where(some[:, None, None], new, old) for some, new, old in zip(alive, news, olds, strict=True)]


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


def orthogonalise(x_G: Tensor, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Orthogonalise matrices approximately by Newton-Schulz iterations.

    X <- X / ||X||_F;  A = X X^T;  `steps` times X <- a X + (b A + c A^2) X: U S V^T becomes approximately U V^T.

    The polynomial a s + b s^3 + c s^5 acts on each singular value s. It is steep at 0 and does not converge to 1: after
    5 steps, singular values between 0.002 and 1 are between 0.68 and 1.21, which trains as well.

    Args:
        x_G: matrices [G, n, m] of one shape; zero matrices stay zero.
        steps: number of iterations.
        dtype: dtype of the products; None = that of x_G.

    Returns:
        matrices with the shape and the dtype of x_G.

    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
    """
    a, b, c = COEFFICIENTS
    tall = x_G.shape[1] > x_G.shape[2]
    x = x_G.mT if tall else x_G  # the Gram matrix of the shorter side is smaller
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=SMALLEST_NORM)
    x = x.to(dtype or x_G.dtype)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).to(x_G.dtype)
