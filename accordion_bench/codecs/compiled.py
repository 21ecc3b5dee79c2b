"""Engine operations for dense codes and drawn coordinates by compiled kernels, for all tensors of a bucket at once.

Kernels are compiled by numba on a CPU and by Triton on a GPU.

Tensor suffixes: W local workers, S senders, M blocks of all tensors.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, NonFiniteRow, Target
from accordion_bench.codecs.coding import SIGNS, BlockNumbers, Coding, kernel_rounding
from accordion_bench.codecs.engine import Engine, header_of
from accordion_bench.codecs.layout import KEPT, Layout, Message
from accordion_bench.tensors.kernels.dense_kernels import Coordinates, Decoding, DenseKernels, Encoding
from accordion_bench.tensors.kernels.table import Table, bucket_size
from accordion_bench.tensors.keyed_rng import BLOCK, streams_of
from accordion_bench.tensors.permutations import Draws, draws_of, words_of
from accordion_bench.tensors.upload import fresh

SLICE = 2048  # coordinates per program of a GPU, except for ternary codes
MEASURED = (("l2",), ("linf",))  # norms that such a program can compute


class Drawn(NamedTuple):
    """Drawn coordinates of all tensors in one buffer [room]; `draws` contains the offsets of the tensors."""

    draws: Draws
    places: Tensor


class Compiled(Engine):
    """Engine with compiled kernels, those of one device, for dense codes and drawn coordinates."""

    def __init__(self, kernels: DenseKernels) -> None:
        self.kernels = kernels

    def norms(self, bucket: Bucket, layout: Layout, *kinds: str) -> list[Tensor]:
        return self.kernels.bucket_norms(bucket.coordinates, table_of(layout), kinds)

    def write(self, message: Message, name: str, numbers_S: Tensor) -> None:
        self.kernels.write_headers(numbers_S, table_of(message.layout, name), message.rows)

    def read(self, message: Message, name: str, alpha: float = 1.0) -> Tensor:
        return self.kernels.read_headers(message.rows, table_of(message.layout, name), alpha)

    def encode(self, bucket: Bucket, message: Message, coding: Coding, numbers: BlockNumbers) -> None:
        if numbers.middles is not None:
            self.write(message, "middles", numbers.middles)
        self.encode_by(self.encoding(bucket, message, coding, numbers), bucket, message, coding)

    def encoding(self, bucket: Bucket, message: Message, coding: Coding, numbers: BlockNumbers) -> Encoding:
        """Return the arguments of the encoding kernel; arguments as for `encode`."""
        factors, factors_W = message.rows.new_empty(0, 0, dtype=torch.float32), numbers.factors
        if factors_W is not None and factors_W.numel():
            factors = factors_W.expand(len(message.rows), -1)
        streams = torch.empty(0, dtype=torch.int64)
        if coding.bits:
            streams = fresh(lambda moment: _streams(bucket.at(moment), coding.stream), bucket, message.rows.device)
        return Encoding(kernel_rounding(coding), numbers.scales, factors, streams, middles=numbers.middles)

    def encode_by(self, encoding: Encoding, bucket: Bucket, message: Message, coding: Coding) -> None:
        """Encode by the kernel with these arguments."""
        table = table_of(message.layout, header_of(coding), tile_of(coding))
        finite = self.kernels.encode(bucket.coordinates, table, message.rows, encoding)
        if finite is not None and not finite.all():
            raise NonFiniteRow(int((~finite).flatten().nonzero()[0][0]))

    def add_codes(
        self, target: Target, message: Message, coding: Coding, shared: Tensor | None, middles: Tensor | None
    ) -> None:
        scales = None if coding.norm else message.rows.new_empty(0, dtype=torch.float32)
        if shared is not None:
            scales = shared.expand(len(message.rows), -1)
        decoding = Decoding(values_of(coding), scales, target.alpha, middles, target.divisor, target.empty)
        table = table_of(message.layout, header_of(coding), tile_of(coding))
        self.kernels.add_values(Coordinates(target.rows_R), table, message.rows, decoding)

    def places(
        self, keys: Callable[[Bucket], Sequence[int]], counts: Sequence[int], bucket: Bucket, device: torch.device
    ) -> Any:
        draws = draws_of(bucket.numels, tuple(counts))
        words = fresh(lambda moment: words_of(keys(bucket.at(moment))), bucket, device)
        return Drawn(draws, self.kernels.draw(draws, words))

    def take(self, rows_W: Sequence[Tensor], places: Any) -> list[Tensor]:
        taken_W = self.kernels.gather(Coordinates.of(rows_W), places.draws, places.places)
        return [taken_W[:, first:last] for first, last in places.draws.spans]

    def put(self, target: Target, values_R: Sequence[Tensor], places: Any, factors: Sequence[float]) -> None:
        target = target.begun()
        scaled = tuple(target.alpha * factor for factor in factors)
        targets, values = Coordinates(target.rows_R), Coordinates.of(values_R)
        self.kernels.scatter(targets, places.draws, places.places, values, scaled)


def values_of(coding: Coding) -> list[np.ndarray]:
    """Return the values of the codes of each stream, in the format of the kernels."""
    return [np.array(own, np.float32) for own in (coding.values, *([SIGNS] if coding.signs else []))]


def _streams(bucket: Bucket, stream: str) -> Tensor:
    """Return the start of the random stream of each tensor, uint64 as int64 [W, T]."""
    return torch.from_numpy(np.stack([streams_of(own) for own in bucket.keys(stream)]).view(np.int64))


def tile_of(coding: Coding) -> int:
    """Return the number of coordinates of a tile: whole blocks of random numbers and whole bytes of codes."""
    return BLOCK * (5 if coding.kinds == 3 else 1)


def measurable(layout: Layout, coding: Coding) -> bool:
    """Return whether blocks fit into a program of a GPU, so that one read yields scales and codes."""
    rule, size = coding.rule, bucket_size(table_of(layout))
    within = coding.kinds != 3 and 8 <= size <= SLICE and size & (size - 1) == 0
    return within and bool(rule.factor) and rule.norms in MEASURED and rule.over in ("", "largest")


@functools.lru_cache(maxsize=4 * KEPT)
def table_of(layout: Layout, header: str = "", tile: int = BLOCK) -> Table:
    """Return the table of coordinates, one field and the codes of a layout for kernels; cached."""

    def offsets(name: str) -> list[int]:
        field = layout.fields.get(name)
        return [0] * len(layout.numels) if field is None else field.offsets.tolist()

    streams = [offsets(name) for name in ("codes", "signs") if name in layout.fields]
    return Table(layout.numels.tolist(), layout.blocks.tolist(), tile, offsets(header), streams)
