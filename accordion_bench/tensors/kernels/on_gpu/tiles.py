"""Largest entries of each tile of matrices on a GPU: selection in one read, and sums of decoded messages.

A program reads its tiles once, keeps their keys in registers and finds the smallest selected key by bisection. A tile
[a, b] is padded to powers of two; tensors of equal padded sizes share a launch.

Tensor suffixes: W workers, S senders, R rows of sums, T tensors, C tiles of all tensors, K entries of all tensors.
"""

import functools
import itertools
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors import upload
from accordion_bench.tensors.kernels.on_gpu.launch import KEPT, TYPES, launch
from accordion_bench.tensors.kernels.on_gpu.selection import Entries, vector_of
from accordion_bench.tensors.kernels.on_gpu.sums import read_float

WIDEST = 4096  # coordinates per program
NARROWEST = 64  # smallest padded size of a tile
LANES = 1024  # entries per program that adds
ALIKE = 4  # rows and tiles whose widths are multiples of 4 are read 16 bytes at a time

COLUMNS = tl.constexpr(9)
M, A, B, KEPT_EACH, WIDTH, INVERSE, NUMBERS, INDICES, CODES = (tl.constexpr(column) for column in range(COLUMNS.value))
"""Columns of a tensor: columns of the matrix; sides of a tile; entries kept per tile; bits of an index; 2^32 / b,
rounded up; first byte in a message of the numbers, the indices and the codes. CODES is -1 without codes."""
OF_TILE = tl.constexpr(4)
TENSOR, CORNER, RANK, ENTRY = (tl.constexpr(column) for column in range(OF_TILE.value))
"""Columns of a tile: tensor; first coordinate; entries of previous tiles of the tensor, and of all tensors."""


class TileShape(NamedTuple):
    """Tiles of a tensor, and offsets of their entries in a message.

    numel: number of coordinates.
    m: number of columns of the matrix.
    a, b: shape of a tile; divisors of the shape of the matrix.
    k: number of entries kept per tile.
    width: number of bits of an index within its tile.
    coded: whether the numbers in a message are a table of four values indexed by codes of two bits.
    numbers, indices, codes: first byte of each field in a message.
    """

    numel: int
    m: int
    a: int
    b: int
    k: int
    width: int
    coded: bool
    numbers: int
    indices: int
    codes: int

    @property
    def room(self) -> tuple[int, int]:
        """Padded numbers of coordinates of a tile and of its rows; powers of two."""
        across = triton.next_power_of_2(self.b)
        return max(NARROWEST, across * triton.next_power_of_2(self.a)), across


class TileGroup(NamedTuple):
    """Tiles that share launches.

    first, size: first row in the table of all tiles, and number of rows.
    tensors: indices of the tensors.
    room, across: see `TileShape.room`.
    entries: padded number of entries per tile; a power of two.
    even: whether the widths of tiles and matrices are multiples of ALIKE.
    """

    first: int
    size: int
    tensors: list[int]
    room: int
    across: int
    entries: int
    even: bool


class TileTables(NamedTuple):
    """Tiles of several tensors, on a GPU.

    rows: int64 [T, COLUMNS].
    tiles: int64 [C, OF_TILE], ordered by group.
    groups: groups of tiles.
    kept: number of entries of all tensors, K.
    """

    rows: Tensor
    tiles: Tensor
    groups: list[TileGroup]
    kept: int


@functools.lru_cache(maxsize=KEPT)
def tables_on(shapes: tuple[TileShape, ...], device: torch.device) -> TileTables:
    """Return the tables of tensors on a device; cached."""
    counts = [shape.numel // (shape.a * shape.b) for shape in shapes]
    kept = [count * shape.k for count, shape in zip(counts, shapes, strict=True)]
    before = list(itertools.accumulate(kept, initial=0))
    alike: dict[tuple[int, int, int, bool], list[int]] = {}
    for t, shape in enumerate(shapes):
        even = shape.m % ALIKE == 0 and shape.b % ALIKE == 0
        alike.setdefault((*shape.room, triton.next_power_of_2(shape.k), even), []).append(t)
    groups, tiles, first = [], [np.zeros((0, OF_TILE.value), np.int64)], 0
    for (room, across, entries, even), tensors in sorted(alike.items()):
        tiles += [_tiles_of(shapes[t], t, before[t]) for t in tensors]
        groups.append(TileGroup(first, sum(counts[t] for t in tensors), tensors, room, across, entries, even))
        first += groups[-1].size
    rows = [
        (one.m, one.a, one.b, one.k, one.width, -(-(1 << 32) // one.b), *one[-3:-1], one.codes if one.coded else -1)
        for one in shapes
    ]
    rows_on, tiles_on = (
        upload.table(torch.from_numpy(x), device) for x in (np.array(rows, np.int64), np.concatenate(tiles))
    )
    return TileTables(rows_on, tiles_on, groups, before[-1])


def _tiles_of(shape: TileShape, t: int, before: int) -> np.ndarray:
    tile, across = np.arange(shape.numel // (shape.a * shape.b)), shape.m // shape.b
    corner = tile // across * shape.a * shape.m + tile % across * shape.b
    return np.stack([np.full_like(tile, t), corner, tile * shape.k, before + tile * shape.k], axis=1)


def largest(addresses: np.ndarray, on: TileTables, like: Tensor) -> Entries:
    """Return the largest magnitudes of each tile by ascending index within the tile; ties go to the lower index.

    NaN counts as the largest magnitude. Tiles have at most WIDEST padded coordinates. One launch per group of tiles.
    Arguments are those of `selection.largest`.
    """
    there, (W, T) = like.device, addresses.shape
    found = Entries(*(torch.empty(W, on.kept, dtype=kind, device=there) for kind in (torch.int32, torch.float32)))
    given = upload.upload(torch.from_numpy(addresses), there)
    for group in on.groups:
        of, together = on.tiles[group.first :], WIDEST // group.room
        vector = vector_of(addresses[:, group.tensors], like) if group.even else 1
        grid = (triton.cdiv(group.size, together), W)
        constants = {"TYPE": TYPES[like.dtype], "TILES": together, "ROOM": group.room, "ACROSS": group.across}
        args = (given, T, on.rows, of, group.size, *found, on.kept)
        launch(_choose, grid, there, *args, **constants, VECTOR=vector)
    return found


def add(targets: np.ndarray, on: TileTables, message: Tensor, alpha: float, like: Tensor) -> None:
    """Add alpha x the entries of each sender, in order, to target [R, N].

    One launch per R senders and group of tiles. An index beyond its tile selects the last coordinate of the tile.
    Arguments are those of `sparse.add_entries`.
    """
    there, (R, T), S = message.device, targets.shape, len(message)
    given = upload.upload(torch.from_numpy(targets), there)
    for first in range(0, S, R):
        own = message[first : first + R]
        for group in on.groups:
            of, together = on.tiles[group.first :], max(1, LANES // group.entries)
            grid = (triton.cdiv(group.size, together), len(own))
            args = (given, T, on.rows, of, group.size, own, own.stride(0), float(alpha))
            launch(_add_tiles, grid, there, *args, TYPE=TYPES[like.dtype], TILES=together, ENTRIES=group.entries)


@triton.jit
def _tiles(rows, tiles, C, TILES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Tiles of a program [TILES, 1]: which exist, tensors, rows of both tables, entries kept."""
    c = tl.program_id(0) * TILES + tl.arange(0, TILES)[:, None]
    there = c < C
    tile = tiles + OF_TILE * c.to(tl.int64)
    t = tl.load(tile + TENSOR, mask=there, other=0)
    row = rows + t * COLUMNS
    k = tl.load(row + KEPT_EACH, mask=there, other=0).to(tl.int32)
    return there, t, row, tile, k


@triton.jit
def _choose(  # type: ignore[no-untyped-def]
    addresses, T, rows, tiles, C, indices, values, K,
    TYPE: tl.constexpr, TILES: tl.constexpr, ROOM: tl.constexpr, ACROSS: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    w = tl.program_id(1).to(tl.int64)
    there, t, row, tile, k = _tiles(rows, tiles, C, TILES)
    a, b = tl.load(row + A).to(tl.int32), tl.multiple_of(tl.load(row + B).to(tl.int32), [1, VECTOR])
    p = tl.arange(0, ROOM)[None, :]
    i, j = p // ACROSS, p % ACROSS
    x = tl.load(addresses + w * T + t) + tl.load(tile + CORNER, mask=there, other=0) * (TYPE.primitive_bitwidth // 8)
    x = tl.multiple_of(x.to(tl.pointer_type(TYPE)), [1, VECTOR * (TYPE.primitive_bitwidth // 8)])
    line = i * tl.multiple_of(tl.load(row + M), [1, VECTOR])
    exists = there & (i < a) & (j < b)
    bits = tl.load(x + line + j, mask=exists, other=0).to(tl.float32).to(tl.uint32, bitcast=True)
    signed = (bits << 1) | (bits >> 31)  # 2 key + sign, so that one register holds both
    low, most = tl.zeros([TILES, 1], tl.uint32), tl.max(signed, axis=1, keep_dims=True) >> 1
    # the k-th largest key is in [low, most]; if exactly k keys are at least `middle`, that is enough
    while tl.max((most - low).to(tl.int32)) > 0:
        middle = most - ((most - low) >> 1)
        count = tl.sum((signed >= (middle << 1)).to(tl.int32), axis=1, keep_dims=True)
        low = tl.where(count >= k, middle, low)
        most = tl.where(count > k, most, tl.where(count < k, middle - 1, middle))
    above = signed > ((low << 1) | 1)
    equal = exists & (above == 0) & (signed >= (low << 1))
    both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    sums = tl.cumsum(both, axis=1) - both
    ties = k - (tl.sum(both, axis=1, keep_dims=True) & 0xFFFF)
    tied = sums >> 16
    taken = above | (equal & (tied < ties))
    first = w * K + tl.load(tile + ENTRY, mask=there, other=0)
    place = (sums & 0xFFFF) + tl.minimum(tied, ties)
    tl.store(indices + first + place, i * b + j, mask=taken)
    bits = (signed >> 1) | (signed << 31)
    tl.store(values + first + place, bits.to(tl.float32, bitcast=True), mask=taken)


@triton.jit
def _add_tiles(  # type: ignore[no-untyped-def]
    targets, T, rows, tiles, C, message, row_bytes, alpha,
    TYPE: tl.constexpr, TILES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    s = tl.program_id(1).to(tl.int64)
    there, t, row, tile, k = _tiles(rows, tiles, C, TILES)
    e, own = tl.arange(0, ENTRIES)[None, :], message + s * row_bytes
    exists = there & (e < k)
    rank = tl.load(tile + RANK, mask=there, other=0) + e
    width, a, b = tl.load(row + WIDTH), tl.load(row + A), tl.load(row + B)
    bit = rank * width
    word = tl.zeros([TILES, ENTRIES], tl.int32)
    for byte in tl.static_range(3):  # an index has at most 12 bits and begins at one of 8 bits
        inside = exists & ((bit & 7) + width > 8 * byte)
        at = own + tl.load(row + INDICES) + (bit >> 3) + byte
        word |= tl.load(at, mask=inside, other=0).to(tl.int32) << (8 * byte)
    index = (word.to(tl.int64) >> (bit & 7)) & ((1 << width) - 1)
    index = tl.minimum(index, a * b - 1)
    codes = tl.load(row + CODES)
    code = tl.load(own + codes + (rank >> 2), mask=exists & (codes >= 0), other=0) >> (2 * (rank & 3)).to(tl.uint8)
    which = tl.where(codes >= 0, (code & 3).to(tl.int64), rank)
    value = read_float(own + tl.load(row + NUMBERS) + 4 * which, exists) * alpha
    i = (index * tl.load(row + INVERSE)) >> 32
    place = tl.load(tile + CORNER, mask=there, other=0) + i * tl.load(row + M) + index - i * b
    target = tl.load(targets + s * T + t).to(tl.pointer_type(TYPE)) + place
    tl.store(target, tl.load(target, mask=exists, other=0) + value.to(TYPE), mask=exists)
