"""Dense codes and drawn coordinates by compiled kernels, for all tensors of a bucket at once.

On a CPU they are numba's, on a GPU Triton's.

Tensor suffixes: W local workers, S senders, M blocks of all tensors.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Target
from accordion_bench.codecs.coding import SIGNS, Coding, kernel_rounding
from accordion_bench.codecs.engine import header_of
from accordion_bench.codecs.layout import KEPT, Layout, Message
from accordion_bench.codecs.non_finite import NonFiniteRow
from accordion_bench.codecs.reference import Reference
from accordion_bench.tensors.counter_rng import BLOCK, streams_of
from accordion_bench.tensors.kernels import Room
from accordion_bench.tensors.kernels.table import Table, addresses
from accordion_bench.tensors.permutations import Draws, draws_of, words_of
from accordion_bench.tensors.upload import fresh


class Drawn(NamedTuple):
    """Drawn coordinates of all tensors, in a buffer [room]; `draws` says whose is what."""

    draws: Draws
    places: Tensor


class Compiled(Reference):
    """Kernels for dense codes and for drawn coordinates.

    Args:
        room: the kernels.
    """

    def __init__(self, room: Room) -> None:
        self.room = room

    def norms(self, rows_W: Sequence[Tensor], layout: Layout, kind: str) -> Tensor:
        rows_W = [contiguous(x_W) for x_W in rows_W]
        return self.room.bucket_norms(addresses(rows_W), table_of(layout), kind, rows_W[0])

    def write(self, message: Message, name: str, numbers_S: Tensor) -> None:
        self.room.write_headers(numbers_S, table_of(message.layout, name), message.rows)

    def read(self, message: Message, name: str, alpha: float = 1.0) -> Tensor:
        return self.room.read_headers(message.rows, table_of(message.layout, name), alpha)

    def encode(
        self, bucket: Bucket, message: Message, coding: Coding, factors_W: Tensor | None, scales_W: Tensor | None
    ) -> None:
        self.write_codes(bucket, message, coding, factors_W, scales_W)

    def write_codes(
        self,
        bucket: Bucket,
        message: Message,
        coding: Coding,
        factors_W: Tensor | None = None,
        scales_W: Tensor | None = None,
        **more: Any,
    ) -> None:
        """As `encode`, by the room's kernel, which may be told more."""
        rows_W = [contiguous(x_W) for x_W in bucket.rows_W]
        if factors_W is None:
            factors_W = message.rows.new_empty(0, 0, dtype=torch.float32)
        streams = torch.empty(0, dtype=torch.int64)
        if coding.bits:
            streams = fresh(lambda moment: _streams(bucket.at(moment), coding.stream), bucket, message.rows.device)
        finite = self.room.encode(
            addresses(rows_W),
            table_of(message.layout, header_of(coding), tile_of(coding)),
            scales_W,
            factors_W.expand(len(message.rows), -1) if factors_W.numel() else factors_W,
            streams,
            message.rows,
            rows_W[0],
            kernel_rounding(coding),
            **more,
        )
        if finite is not None and not finite.all():
            raise NonFiniteRow(int((~finite).flatten().nonzero()[0][0]))

    def add_codes(
        self, target: Target, message: Message, coding: Coding, shared: Tensor | None, middles: Tensor | None
    ) -> None:
        scales = None if coding.norm else message.rows.new_empty(0, dtype=torch.float32)
        if shared is not None:
            scales = shared.expand(len(message.rows), -1)
        values = [np.array(coding.values, np.float32)]
        if coding.signs:
            values.append(np.array(SIGNS, np.float32))
        self.room.add_values(
            addresses(target.rows_R),
            table_of(message.layout, header_of(coding), tile_of(coding)),
            scales,
            target.alpha,
            message.rows,
            values,
            target.rows_R[0],
            target.divisor,
            middles,
            target.empty,
        )

    def places(
        self, keys: Callable[[Bucket], Sequence[int]], counts: Sequence[int], bucket: Bucket, device: torch.device
    ) -> Any:
        draws = draws_of(bucket.numels, tuple(counts))
        words = fresh(lambda moment: words_of(keys(bucket.at(moment))), bucket, device)
        return Drawn(draws, self.room.draw(draws, words))

    def take(self, rows_W: Sequence[Tensor], places: Any) -> list[Tensor]:
        rows_W = [contiguous(x_W) for x_W in rows_W]
        taken_W = self.room.gather(addresses(rows_W), places.draws, places.places, rows_W[0])
        return [taken_W[:, first:last] for first, last in places.draws.spans]

    def put(self, target: Target, values_R: Sequence[Tensor], places: Any, factors: Sequence[float]) -> None:
        target, values_R = target.begun(), [contiguous(own_R) for own_R in values_R]
        scaled = tuple(target.alpha * factor for factor in factors)
        at, values = addresses(target.rows_R), addresses(values_R)
        self.room.scatter(at, places.draws, places.places, values, scaled, target.rows_R[0])


def _streams(bucket: Bucket, stream: str) -> Tensor:
    """Where the stream of each worker's tensors begins, the bits of uint64: int64 [W, T]."""
    return torch.from_numpy(np.stack([streams_of(own) for own in bucket.keys(stream)]).view(np.int64))


def tile_of(coding: Coding) -> int:
    """Coordinates of a tile: whole blocks of random numbers, whole bytes of codes."""
    return BLOCK * (5 if coding.kinds == 3 else 1)


@functools.lru_cache(maxsize=4 * KEPT)
def table_of(layout: Layout, header: str = "", tile: int = BLOCK) -> Table:
    """Where coordinates, the numbers of one field and the codes of a layout are, as kernels are told; remembered."""

    def offsets(name: str) -> list[int]:
        field = layout.fields.get(name)
        return [0] * len(layout.numels) if field is None else field.offsets.tolist()

    streams = [offsets(name) for name in ("codes", "signs") if name in layout.fields]
    return Table(layout.numels.tolist(), layout.blocks.tolist(), tile, offsets(header), streams)


def contiguous(x_W: Tensor) -> Tensor:
    """[W, N] with coordinates of a row side by side."""
    return x_W if x_W.stride(1) == 1 else x_W.contiguous()
