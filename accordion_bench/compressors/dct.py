"""The orthonormal DCT-II of matrices cut into chunks, as small matrix products.

Tensor suffixes: R rows (matrices), C chunks of a matrix, N coefficients of a chunk.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from accordion_bench.plan import TensorSpec


@dataclass(frozen=True)
class Chunks:
    """Matrices [n, m] as chunks [a, b], row by row; a coefficient is one of N = a b numbers of a chunk.

    Args:
        n, m: shape of a matrix.
        a, b: of a chunk; divisors of n and m.
    """

    n: int
    m: int
    a: int
    b: int

    @classmethod
    def of(cls, spec: TensorSpec, limit: int) -> "Chunks":
        """Each side the largest divisor of its dimension that is at most `limit`; of the matrix view of a tensor."""
        n, m = spec.matrix if spec.ndim else (1, 1)
        return cls(n, m, largest_divisor(n, limit), largest_divisor(m, limit))

    @property
    def numel(self) -> int:
        """N, coefficients of a chunk."""
        return self.a * self.b

    @property
    def count(self) -> int:
        """C, chunks of a matrix."""
        return self.n * self.m // self.numel

    def dct(self, x_R: Tensor) -> Tensor:
        """Coefficients [R, C, N] of matrices [R, ...]: A X B^T for each chunk X."""
        R, A, B = len(x_R), *self._matrices(x_R)
        chunks = x_R.reshape(R, self.n // self.a, self.a, self.m // self.b, self.b).transpose(2, 3)
        half = chunks.reshape(-1, self.b) @ B.T
        return (A @ half.view(-1, self.a, self.b)).view(R, self.count, self.numel)

    def coefficients(self, chunks: Tensor) -> Tensor:
        """The coefficients [..., N] of chunks [..., N]: A X B^T for each X."""
        A, B = self._matrices(chunks)
        half = chunks.reshape(-1, self.b) @ B.T
        return (A @ half.view(-1, self.a, self.b)).view(chunks.shape)

    def chunks_from(self, coefficients: Tensor) -> Tensor:
        """The chunks [..., N] of coefficients [..., N]: A^T Y B for each Y."""
        A, B = self._matrices(coefficients)
        half = A.T @ coefficients.reshape(-1, self.a, self.b)
        return (half.view(-1, self.b) @ B).view(coefficients.shape)

    def joined(self, chunks_R: Tensor) -> Tensor:
        """Matrices [R, n, m] of their chunks [R, C, N]."""
        R = len(chunks_R)
        grid = chunks_R.reshape(R, self.n // self.a, self.m // self.b, self.a, self.b)
        return grid.transpose(2, 3).reshape(R, self.n, self.m)

    def inverse(self, coefficients_R: Tensor) -> Tensor:
        """Matrices [R, n, m] of coefficients [R, C, N]."""
        return self.joined(self.chunks_from(coefficients_R))

    def _matrices(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return dct_matrix(self.a, like.dtype, like.device), dct_matrix(self.b, like.dtype, like.device)


@functools.cache
def dct_matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Row p, column s: sqrt(2/n) cos(pi (2s + 1) p / 2n), and sqrt(1/n) in row 0."""
    p, s = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    matrix = (math.pi * (2 * s + 1) * p / (2 * n)).cos() * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix.to(device=device, dtype=dtype)


@functools.cache
def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most `limit`; 1 for n = 0."""
    return next((side for side in range(min(n, limit), 0, -1) if n % side == 0), 1)
