"""The messages of chunked TopK: of each tile of a matrix its largest entries, at two bits each where so wanted.

Tensor suffixes: A all workers.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Target
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import KEPT, Layout, Message
from accordion_bench.codecs.packed_codes import unpack_codes
from accordion_bench.codecs.tiles import BINS, TileForm, Tiles, floats, in_order
from accordion_bench.plan import TensorSpec


class TiledMessages:
    """Of each tile the k = ceil(density N) largest magnitudes; ties go to the lower index.

    Tiles are a x b: each side is the largest divisor of its dimension, in the matrix view, that is at most `chunk`.
    See `codecs.tiles.encode_largest` for values of two bits.

    Args:
        chunk: largest side of a tile; larger = fewer tiles, longer indices.
        value_bits: 2, or None = float32.

    Source: Sarfi et al. 2025, SparseLoCo (arXiv 2508.15706), and its authors' code.
    """

    def __init__(self, chunk: int, value_bits: int | None) -> None:
        self.chunk, self.coded = chunk, value_bits is not None

    def form(self, spec: TensorSpec, density: float) -> TileForm:
        """What the message of a tensor looks like."""
        return form_of(spec, self.chunk, density, self.coded)

    def forms(self, specs: Sequence[TensorSpec], densities: Sequence[float]) -> list[TileForm]:
        """The same of several tensors."""
        return [self.form(spec, density) for spec, density in zip(specs, densities, strict=True)]

    def contraction(self, spec: TensorSpec, density: float) -> float | None:
        """k / N of exact values; what two bits lose of the kept ones hangs on them."""
        form = self.form(spec, density)
        return None if self.coded else form.k / form.tiles.numel

    def layout(self, specs: Sequence[TensorSpec], densities: Sequence[float]) -> Layout:
        """Numbers, indices and codes of each tensor."""
        return tiled_layout(tuple(spec.numel for spec in specs), tuple(self.forms(specs, densities)))

    def encode_bucket(self, bucket: Bucket) -> Message:
        """See `Gathered`."""
        layout = self.layout(bucket.specs, bucket.levels)
        message = Message.empty(layout, len(bucket.workers), bucket.rows_W[0].device)
        engine_for(bucket.rows_W).encode_tiles(bucket, message, self.forms(bucket.specs, bucket.levels))
        return message

    def add_bucket_(self, target: Target, message: Message, bucket: Bucket) -> None:
        """See `Gathered`."""
        engine_for(target.rows_R).add_tiles(target, message, self.forms(bucket.specs, bucket.levels))

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
def form_of(spec: TensorSpec, chunk: int, density: float, coded: bool) -> TileForm:
    """What the message of a tensor looks like; asked for several times in a step."""
    tiles = Tiles.of(spec, chunk)
    # 1e-9: a density such as 0.07 times 100 is 7.000000000000001 in floating point
    return TileForm(tiles, min(tiles.numel, max(1, math.ceil(density * tiles.numel - 1e-9))), coded)


@functools.lru_cache(maxsize=KEPT)
def tiled_layout(numels: tuple[int, ...], forms: tuple[TileForm, ...]) -> Layout:
    """Numbers, indices and codes of each tensor; remembered."""
    numbers, indices, codes = zip(*(form.parts for form in forms), strict=True) if forms else ((), (), ())
    fields = {
        "numbers": (torch.float32, [nbytes // 4 for nbytes in numbers]),
        "indices": (torch.uint8, indices),
        "codes": (torch.uint8, codes),
    }
    return Layout(numels, [max(1, n) for n in numels], fields)
