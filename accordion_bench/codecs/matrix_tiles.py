"""Tiles: a matrix cut into tiles of equal shape, their DCT, and messages of the largest entries of each tile.

Tensor suffixes: W local workers, S senders, R rows (one tensor of one worker each), C tiles of a matrix, N entries of a
tile, K kept entries of all tiles, B bytes.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from accordion_bench.codecs.packed_codes import code_bytes, floats_in, pack_bits, pack_codes, unpack_bits, unpack_codes
from accordion_bench.codecs.selection import top_positions
from accordion_bench.plan import TensorSpec


@dataclass(frozen=True)
class Tiles:
    """Partition of matrices [n, m] into tiles [a, b] in row-major order; a tile has N = a b entries in that order.

    Args:
        n, m: shape of a matrix.
        a, b: shape of a tile; divisors of n and m.
    """

    n: int
    m: int
    a: int
    b: int

    @classmethod
    def of(cls, spec: TensorSpec, limit: int) -> Self:
        """Return tiles of the matrix view of a tensor; each side is the largest divisor that is at most `limit`."""
        n, m = spec.matrix if spec.ndim else (1, 1)
        return cls(n, m, largest_divisor(n, limit), largest_divisor(m, limit))

    @property
    def numel(self) -> int:
        """N, number of entries of a tile."""
        return self.a * self.b

    @property
    def count(self) -> int:
        """C, number of tiles of a matrix."""
        return self.n * self.m // self.numel

    def grid(self, x_R: Tensor) -> Tensor:
        """Return matrices [R, ...] as a grid of tiles [R, n / a, m / b, a, b]; a view if they are contiguous."""
        return x_R.reshape(len(x_R), self.n // self.a, self.a, self.m // self.b, self.b).transpose(2, 3)

    def grid_of_tiles(self, tiles_R: Tensor) -> Tensor:
        """Return tiles [R, C, N] as a grid [R, n / a, m / b, a, b]; a view."""
        return tiles_R.unflatten(2, (self.a, self.b)).unflatten(1, (self.n // self.a, self.m // self.b))

    def cut(self, x_R: Tensor) -> Tensor:
        """Return matrices [R, ...] as tiles [R, C, N]."""
        return self.grid(x_R).reshape(len(x_R), self.count, self.numel)

    def joined(self, tiles_R: Tensor) -> Tensor:
        """Return tiles [R, C, N] as matrices [R, n, m]; inverse of `cut`."""
        return self.grid_of_tiles(tiles_R).transpose(2, 3).reshape(len(tiles_R), self.n, self.m)

    def places(self, positions: Tensor) -> Tensor:
        """Return row-major indices in the matrix for positions in the concatenation of all tiles."""
        tile, entry, across = positions // self.numel, positions % self.numel, self.m // self.b
        row, column = tile // across * self.a + entry // self.b, tile % across * self.b + entry % self.b
        return row * self.m + column


@functools.cache
def largest_divisor(n: int, limit: int) -> int:
    """Return the largest divisor of n that is at most `limit`; 1 for n = 0."""
    return next((side for side in range(min(n, limit), 0, -1) if n % side == 0), 1)


BINS = 4  # codes of two bits
SIGMAS = 6.0  # range of all bins, in standard deviations


class TileForm(NamedTuple):
    """Format of the message of a tensor: float32 numbers, indices and codes, each ordered by tile.

    Args:
        tiles: tiles of the tensor.
        k: number of entries kept per tile.
        coded: whether the numbers are a table of BINS values indexed by codes of two bits; otherwise they are the kept
            entries.
    """

    tiles: Tiles
    k: int
    coded: bool

    @property
    def kept(self) -> int:
        """K, number of kept entries of all tiles."""
        return self.tiles.count * self.k

    @property
    def width(self) -> int:
        """Number of bits of an index within its tile, ceil(log2 N)."""
        return (self.tiles.numel - 1).bit_length()

    @property
    def parts(self) -> list[int]:
        """Numbers of bytes of the fields numbers, indices and codes."""
        numbers = BINS if self.coded else self.kept
        return [4 * numbers, -(-self.kept * self.width // 8), code_bytes(self.kept, BINS) if self.coded else 0]


def encode_largest(x_R: Tensor, form: TileForm) -> list[Tensor]:
    """Encode the k largest magnitudes of each tile of rows [R, N].

    Ties go to the lower index. Codes of two bits depend on mean mu and deviation sigma (over K - 1) of the kept v:

        bin = clip(round((v - mu) / (6 sigma / 4)) + 2, 0, 3);   decode = mean of the members of the bin

    NaN counts as the largest magnitude, so that it appears in the numbers.

    Returns:
        numbers, float32; indices and codes, uint8; [R, ...] each.
    """
    row_R = form.tiles.cut(x_R.float()).flatten(1)
    positions_R = top_positions(row_R, form.tiles.numel, form.k)
    numbers_R = row_R.gather(1, positions_R)
    indices_R = pack_numbers(positions_R % form.tiles.numel, form.width)
    if not form.coded:
        return [numbers_R, indices_R, indices_R[:, :0]]
    codes_R, table_R = quantised(numbers_R)
    return [table_R, indices_R, pack_codes(codes_R, BINS)]


def add_largest_(total_R: Tensor, message_R: Tensor, form: TileForm, alpha: float) -> None:
    """Add alpha x the entries of messages [R, B] of one sender to total_R [R, N] in place."""
    tiles, last = form.tiles, form.tiles.numel - 1
    starts = tiles.numel * torch.arange(tiles.count, device=total_R.device)[:, None]
    numbers_R, indices_R, codes_R = message_R.split(form.parts, dim=1)
    values_R = floats_in(numbers_R)
    if form.coded:
        values_R = values_R.gather(1, unpack_codes(codes_R, BINS, form.kept).long())
    # only a malformed message contains an index beyond its tile
    entries_R = unpack_numbers(indices_R, form.width, form.kept).clamp_(max=last)
    positions_R = (entries_R.unflatten(1, (tiles.count, form.k)) + starts).flatten(1)
    total_R.scatter_add_(1, tiles.places(positions_R), (values_R * alpha).to(total_R.dtype))


def quantised(values_R: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise values [R, K]; return codes, uint8 [R, K], and the table of their values, float32 [R, BINS]."""
    v_R, K = values_R.double(), values_R.shape[1]
    centred_R = v_R - (in_order(v_R) / K)[:, None]
    sigma_R = (in_order(centred_R.square()) / max(K - 1, 1)).sqrt()[:, None]
    step_R = sigma_R * (SIGMAS / BINS)
    bins_R = torch.where(step_R > 0, centred_R / step_R, 0.0).round_().add_(BINS // 2).clamp_(0, BINS - 1)
    members = [bins_R == code for code in range(BINS)]
    sums_R = [in_order(torch.where(member_R, v_R, 0.0)) / member_R.sum(1).clamp_min(1) for member_R in members]
    return bins_R.to(torch.uint8), torch.stack(sums_R, dim=1).float()


def in_order(values_R: Tensor) -> Tensor:
    """Return sums [R] of rows [R, K], added one by one: the same for any number of rows and threads on a CPU."""
    return values_R.cumsum(1)[:, -1]


def pack_numbers(numbers_R: Tensor, width: int) -> Tensor:
    """Pack numbers below 2^width, int64 [R, n], into bytes [R, ceil(n width / 8)], least significant bit first."""
    places = torch.arange(width, device=numbers_R.device)
    return pack_bits(((numbers_R[:, :, None] >> places) & 1).bool().flatten(1))


def unpack_numbers(bytes_R: Tensor, width: int, count: int) -> Tensor:
    """Unpack numbers, int64 [R, count]; inverse of `pack_numbers`."""
    bits_R = unpack_bits(bytes_R.contiguous(), count * width).view(len(bytes_R), count, width)
    return (bits_R.long() << torch.arange(width, device=bytes_R.device)).sum(2)


@dataclass(frozen=True)
class Chunks(Tiles):
    """Matrices [n, m] as chunks [a, b], row by row; each chunk has N = a b coefficients."""

    def coefficients(self, chunks: Tensor) -> Tensor:
        """Return the coefficients [..., N] of chunks [..., N]: A X B^T for each X."""
        A, B = self._matrices(chunks)
        half = chunks.reshape(-1, self.b) @ B.T
        return (A @ half.view(-1, self.a, self.b)).view(chunks.shape)

    def chunks_from(self, coefficients: Tensor) -> Tensor:
        """Return the chunks [..., N] of coefficients [..., N]: A^T Y B for each Y."""
        A, B = self._matrices(coefficients)
        half = A.T @ coefficients.reshape(-1, self.a, self.b)
        return (half.view(-1, self.b) @ B).view(coefficients.shape)

    def inverse(self, coefficients_R: Tensor) -> Tensor:
        """Return the matrices [R, n, m] of coefficients [R, C, N]."""
        return self.joined(self.chunks_from(coefficients_R))

    def _matrices(self, like: Tensor) -> tuple[Tensor, Tensor]:
        return dct_matrix(self.a, like.dtype, like.device), dct_matrix(self.b, like.dtype, like.device)


@functools.cache
def dct_matrix(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the DCT matrix [n, n]: in row p, column s, sqrt(2/n) cos(pi (2s + 1) p / 2n), and sqrt(1/n) in row 0."""
    p, s = torch.arange(n, dtype=torch.float64)[:, None], torch.arange(n, dtype=torch.float64)
    matrix = (math.pi * (2 * s + 1) * p / (2 * n)).cos() * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix.to(device=device, dtype=dtype)
