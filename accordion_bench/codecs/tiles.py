"""Tiles: a matrix cut into small ones of equal sides, and messages of the largest entries of each.

Tensor suffixes: W local workers, S senders, R rows (one worker's view of one tensor each), C tiles of a matrix, N
entries of a tile, K kept entries of all tiles, B bytes.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from accordion_bench.codecs.index_codes import pack_bits, unpack_bits
from accordion_bench.codecs.packed_codes import code_bytes, pack_codes, unpack_codes
from accordion_bench.codecs.selection import top_positions
from accordion_bench.plan import TensorSpec


@dataclass(frozen=True)
class Tiles:
    """Matrices [n, m] as tiles [a, b], row by row; the entries of a tile are its N = a b numbers, row by row.

    Args:
        n, m: shape of a matrix.
        a, b: of a tile; divisors of n and m.
    """

    n: int
    m: int
    a: int
    b: int

    @classmethod
    def of(cls, spec: TensorSpec, limit: int) -> Self:
        """Each side the largest divisor of its dimension that is at most `limit`; of the matrix view of a tensor."""
        n, m = spec.matrix if spec.ndim else (1, 1)
        return cls(n, m, largest_divisor(n, limit), largest_divisor(m, limit))

    @property
    def numel(self) -> int:
        """N, entries of a tile."""
        return self.a * self.b

    @property
    def count(self) -> int:
        """C, tiles of a matrix."""
        return self.n * self.m // self.numel

    def grid(self, x_R: Tensor) -> Tensor:
        """Matrices [R, ...] as a grid of tiles, [R, n / a, m / b, a, b]; a view of contiguous ones."""
        return x_R.reshape(len(x_R), self.n // self.a, self.a, self.m // self.b, self.b).transpose(2, 3)

    def grid_of_tiles(self, tiles_R: Tensor) -> Tensor:
        """The same of tiles [R, C, N]."""
        return tiles_R.unflatten(2, (self.a, self.b)).unflatten(1, (self.n // self.a, self.m // self.b))

    def cut(self, x_R: Tensor) -> Tensor:
        """Matrices [R, ...] as tiles [R, C, N]."""
        return self.grid(x_R).reshape(len(x_R), self.count, self.numel)

    def joined(self, tiles_R: Tensor) -> Tensor:
        """The inverse of `cut`: matrices [R, n, m]."""
        return self.grid_of_tiles(tiles_R).transpose(2, 3).reshape(len(tiles_R), self.n, self.m)

    def places(self, positions: Tensor) -> Tensor:
        """Where in the matrix, row by row, the entries are that stand at these positions in the row of all tiles."""
        tile, entry, across = positions // self.numel, positions % self.numel, self.m // self.b
        row, column = tile // across * self.a + entry // self.b, tile % across * self.b + entry % self.b
        return row * self.m + column


@functools.cache
def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most `limit`; 1 for n = 0."""
    return next((side for side in range(min(n, limit), 0, -1) if n % side == 0), 1)


BINS = 4  # what two bits tell apart
SIGMAS = 6.0  # standard deviations that they span


class TileForm(NamedTuple):
    """What the message of a tensor looks like: numbers as float32, indices, codes; one tile after the other.

    Args:
        tiles: of the tensor.
        k: entries kept of each tile.
        coded: whether the numbers are a table of BINS that codes of two bits point into; else the entries themselves.
    """

    tiles: Tiles
    k: int
    coded: bool

    @property
    def kept(self) -> int:
        """K."""
        return self.tiles.count * self.k

    @property
    def width(self) -> int:
        """Bits of an index within its tile, ceil(log2 N)."""
        return (self.tiles.numel - 1).bit_length()

    @property
    def parts(self) -> list[int]:
        """Bytes of numbers, indices and codes."""
        numbers = BINS if self.coded else self.kept
        return [4 * numbers, -(-self.kept * self.width // 8), code_bytes(self.kept, BINS) if self.coded else 0]


def encode_largest(x_R: Tensor, form: TileForm) -> list[Tensor]:
    """Of each tile of rows [R, N] the largest magnitudes: numbers, float32, indices and codes, bytes; [R, ...] each.

    Ties go to the lower index. With codes of two bits, from mean mu and deviation sigma (over K - 1) of kept values v:

        bin = clip(round((v - mu) / (6 sigma / 4)) + 2, 0, 3);   decode = mean of the members of the bin

    NaN is the largest magnitude of all, so that it is seen in the numbers.
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
    """total_R [R, N] += alpha x the entries of messages [R, B] of one sender."""
    tiles, last = form.tiles, form.tiles.numel - 1
    starts = tiles.numel * torch.arange(tiles.count, device=total_R.device)[:, None]
    numbers_R, indices_R, codes_R = message_R.split(form.parts, dim=1)
    values_R = floats(numbers_R)
    if form.coded:
        values_R = values_R.gather(1, unpack_codes(codes_R, BINS, form.kept).long())
    # an index beyond its tile comes from a stranger
    entries_R = unpack_numbers(indices_R, form.width, form.kept).clamp_(max=last)
    positions_R = (entries_R.unflatten(1, (tiles.count, form.k)) + starts).flatten(1)
    total_R.scatter_add_(1, tiles.places(positions_R), (values_R * alpha).to(total_R.dtype))


def quantised(values_R: Tensor) -> tuple[Tensor, Tensor]:
    """Values [R, K] as codes, uint8 [R, K], and the table of what they stand for, float32 [R, BINS]."""
    v_R, K = values_R.double(), values_R.shape[1]
    centred_R = v_R - (in_order(v_R) / K)[:, None]
    sigma_R = (in_order(centred_R.square()) / max(K - 1, 1)).sqrt()[:, None]
    step_R = sigma_R * (SIGMAS / BINS)
    bins_R = torch.where(step_R > 0, centred_R / step_R, 0.0).round_().add_(BINS // 2).clamp_(0, BINS - 1)
    members = [bins_R == code for code in range(BINS)]
    sums_R = [in_order(torch.where(member_R, v_R, 0.0)) / member_R.sum(1).clamp_min(1) for member_R in members]
    return bins_R.to(torch.uint8), torch.stack(sums_R, dim=1).float()


def in_order(values_R: Tensor) -> Tensor:
    """Sums [R] of rows [R, K], entry after entry: the same for any number of rows and threads, and in kernels."""
    return values_R.cumsum(1)[:, -1]


def floats(bytes_R: Tensor) -> Tensor:
    """The float32 [R, n] in bytes [R, 4 n]; a copy, because a row may begin where no float32 does."""
    return bytes_R.clone(memory_format=torch.contiguous_format).view(torch.float32)


def pack_numbers(numbers_R: Tensor, width: int) -> Tensor:
    """Numbers below 2^width, int64 [R, n], as bytes [R, ceil(n width / 8)], the least significant bit first."""
    places = torch.arange(width, device=numbers_R.device)
    return pack_bits(((numbers_R[:, :, None] >> places) & 1).bool().flatten(1))


def unpack_numbers(bytes_R: Tensor, width: int, count: int) -> Tensor:
    """The inverse of `pack_numbers`: int64 [R, count]."""
    bits_R = unpack_bits(bytes_R.contiguous(), count * width).view(len(bytes_R), count, width)
    return (bits_R.long() << torch.arange(width, device=bytes_R.device)).sum(2)
