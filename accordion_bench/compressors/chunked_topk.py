"""The messages of chunked TopK: of each tile of a matrix its largest entries, at two bits each where so wanted.

Tensor suffixes: W local workers, A all workers, R rows (one worker's view of one tensor each), C tiles, N entries of a
tile, K kept entries of all tiles, B bytes.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from accordion_bench.codecs.index_codes import pack_bits, unpack_bits
from accordion_bench.codecs.non_finite import NonFiniteRow, refuse_non_finite
from accordion_bench.codecs.packed_codes import code_bytes, pack_codes, unpack_codes
from accordion_bench.codecs.top_keys import Part, top_positions
from accordion_bench.compressors.tiles import Tiles
from accordion_bench.plan import TensorSpec

BINS = 4  # what two bits tell apart
SIGMAS = 6.0  # standard deviations that they span


class Form(NamedTuple):
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


class TiledMessages:
    """Of each tile the k = ceil(density N) largest magnitudes; ties go to the lower index.

    Tiles are a x b: each side is the largest divisor of its dimension, in the matrix view, that is at most `chunk`.
    With two bits, mu and sigma of the kept values v of a tensor (sigma with K - 1):

        bin = clip(round((v - mu) / (6 sigma / 4)) + 2, 0, 3);   decode = mean of the members of the bin

    Args:
        chunk: largest side of a tile; larger = fewer tiles, longer indices.
        value_bits: 2, or None = float32.

    Source: Sarfi et al. 2025, SparseLoCo (arXiv 2508.15706), and its authors' code.
    """

    def __init__(self, chunk: int, value_bits: int | None) -> None:
        self.chunk, self.coded = chunk, value_bits is not None

    def form(self, spec: TensorSpec, density: float) -> Form:
        """What the message of a tensor looks like."""
        return form_of(spec, self.chunk, density, self.coded)

    def message_bytes(self, spec: TensorSpec, density: float) -> int:
        """Its exact length."""
        return sum(self.form(spec, density).parts)

    def contraction(self, spec: TensorSpec, density: float) -> float | None:
        """k / N of exact values; what two bits lose of the kept ones hangs on them."""
        form = self.form(spec, density)
        return None if self.coded else form.k / form.tiles.numel

    # ---- by torch

    def encode(self, x_R: Tensor, spec: TensorSpec, density: float) -> Tensor:
        """Rows [R, N] as messages [R, B].

        Raises:
            NonFiniteRow: a kept value is NaN or infinite; these are the largest of all.
        """
        form = self.form(spec, density)
        row_R = form.tiles.cut(x_R.float()).flatten(1)
        positions_R = top_positions(row_R, [Part(0, form.tiles.count, form.tiles.numel, form.k)])
        numbers_R = row_R.gather(1, positions_R)
        refuse_non_finite(numbers_R)
        indices_R = pack_numbers(positions_R % form.tiles.numel, form.width)
        if not form.coded:
            return torch.cat([numbers_R.view(torch.uint8), indices_R], dim=1)
        codes_R, table_R = quantised(numbers_R)
        return torch.cat([table_R.view(torch.uint8), indices_R, pack_codes(codes_R, BINS)], dim=1)

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, density: float, alpha: float = 1.0
    ) -> None:
        """total_R [R, N] += alpha x the entries of each message [A, R, B], one worker after the other."""
        form = self.form(spec, density)
        tiles, last = form.tiles, form.tiles.numel - 1
        starts = tiles.numel * torch.arange(tiles.count, device=total_R.device)[:, None]
        for message_R in message_AR:
            numbers_R, indices_R, codes_R = message_R.split(form.parts, dim=1)
            values_R = floats(numbers_R)
            if form.coded:
                values_R = values_R.gather(1, unpack_codes(codes_R, BINS, form.kept).long())
            # an index beyond its tile comes from a stranger
            entries_R = unpack_numbers(indices_R, form.width, form.kept).clamp_(max=last)
            positions_R = (entries_R.unflatten(1, (tiles.count, form.k)) + starts).flatten(1)
            total_R.scatter_add_(1, tiles.places(positions_R), (values_R * alpha).to(total_R.dtype))

    # ---- by kernels

    def encode_into_(
        self,
        message_W: Tensor,
        starts: Sequence[int],
        rows_W: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        density: float,
    ) -> None:
        """Write tensors [W, N] into a buffer [W, B], each from its start on; `kernels.usable` has said that they can.

        Raises:
            NonFiniteRow: row w T + t is worker w's part of tensor t.
        """
        from accordion_bench.tensors.kernels.tiles import encode_tiles

        bad = encode_tiles(message_W, starts, rows_W, self._shapes(specs, density), SIGMAS / BINS)
        if bad.any():
            raise NonFiniteRow(int(bad.argmax()))

    def add_from_(
        self,
        targets_R: Sequence[Tensor],
        message_A: Tensor,
        starts: Sequence[int],
        specs: Sequence[TensorSpec],
        density: float,
        alpha: float = 1.0,
        divisor: int = 1,
    ) -> None:
        """target [R, N] += alpha x what messages [A, B] hold, sender a into row a mod R; then / divisor."""
        from accordion_bench.tensors.kernels.tiles import add_tiles

        add_tiles(targets_R, message_A, starts, self._shapes(specs, density), alpha, divisor)

    def _shapes(self, specs: Sequence[TensorSpec], density: float) -> list[tuple[int, ...]]:
        """What a kernel must know of each: `kernels.tiles.SHAPE`."""
        forms = [self.form(spec, density) for spec in specs]
        return [
            (spec.numel, form.tiles.m, form.tiles.a, form.tiles.b, form.k, form.width, form.coded)
            for spec, form in zip(specs, forms, strict=True)
        ]

    # ---- after the all-gather

    def clip_(self, message_A: Tensor, specs: Sequence[TensorSpec], densities: Sequence[float]) -> None:
        """v_w <- v_w min(1, median_A ||v|| / ||v_w||), tensor by tensor, in all workers' messages [A, B].

        The median of an even number of workers is the lower of the two in the middle. Every worker computes the same
        factors from the same bytes, whatever the number of its threads.
        """
        start = 0
        for spec, density in zip(specs, densities, strict=True):
            form = self.form(spec, density)
            size = sum(form.parts)
            own_A, start = message_A[:, start : start + size], start + size
            numbers_A, _, codes_A = own_A.split(form.parts, dim=1)
            values_A = floats(numbers_A)
            squares_A = values_A.double().square()
            if form.coded:
                squares_A = squares_A.gather(1, unpack_codes(codes_A, BINS, form.kept).long())
            norms_A = in_order(squares_A).sqrt()
            median = norms_A.median()
            factors_A = torch.where(norms_A > median, median / norms_A, 1.0).float()
            numbers_A.copy_((values_A * factors_A[:, None]).view(torch.uint8))


@functools.lru_cache(4096)
def form_of(spec: TensorSpec, chunk: int, density: float, coded: bool) -> Form:
    """What the message of a tensor looks like; asked for several times in a step."""
    tiles = Tiles.of(spec, chunk)
    # 1e-9: a density such as 0.07 times 100 is 7.000000000000001 in floating point
    return Form(tiles, min(tiles.numel, max(1, math.ceil(density * tiles.numel - 1e-9))), coded)


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
