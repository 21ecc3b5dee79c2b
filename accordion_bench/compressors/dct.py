"""The orthonormal DCT-II of matrices cut into chunks, as small matrix products.

Tensor suffixes: R rows (matrices), C chunks of a matrix, N coefficients of a chunk.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from accordion_bench.codecs.tiles import Tiles


@dataclass(frozen=True)
class Chunks(Tiles):
    """Matrices [n, m] as chunks [a, b], row by row; a coefficient is one of N = a b numbers of a chunk."""

    def dct(self, x_R: Tensor) -> Tensor:
        """Coefficients [R, C, N] of matrices [R, ...]: A X B^T for each chunk X."""
        return self.coefficients(self.cut(x_R))

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
