"""Exact selection of the largest magnitudes of every tensor, ties to the lower index, without synchronisation.

A radix search finds the key of the last selected entry, four bits per round from the highest bits on. A round counts
the keys of each digit among the keys with the known higher digits. The search runs

    1  on a sample, twice, for a lower and an upper bound of the key;
    2  on the keys between the bounds, which one read of all coordinates stores for each block;
    3  on all coordinates, if the key is not between the bounds or too many keys are.

Each tensor takes way 2 or way 3 in the same launches. The numbers of larger and of equal keys per block determine the
positions of its entries. All counts are integers, so they are exact in any order of summation.

A block is the part of a tensor that one program processes. Keys are the bits of |x| as float32, whose order is that of
magnitudes, with NaN above infinity.

Tensor suffixes: W workers, T tensors, B blocks, K entries of all tensors.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors import upload
from accordion_bench.tensors.kernels.on_gpu.launch import KEPT, TYPES, launch, parts_on

BLOCK = tl.constexpr(1 << 14)  # most coordinates of a block
SAMPLE = 1 << 14  # fewest coordinates of the sample for bounds, if the tensor has as many
SECTOR = tl.constexpr(8)  # contiguous coordinates of a sample: 32 bytes, the unit of reads on a GPU
SPARSEST = 64  # inverse of the smallest fraction of coordinates in a sample, approximately
DEVIATIONS = 5  # standard deviations of a rank in a sample between its bounds and its expectation

COLUMNS = tl.constexpr(9)
N, WANTED, FIRST, BLOCKS, FIRST_BLOCK, SAMPLED, STEP, RANK = (tl.constexpr(column) for column in range(8))
"""Columns of a tensor: coordinates; entries wanted; entries of previous tensors; blocks; blocks of previous tensors;
coordinates of the sample with a full last sector; stride of the sectors in the sample; ranks in the sample of a lower
and of an upper bound of the key."""

KEY_BITS = tl.constexpr(31)
HIGHEST = tl.constexpr((1 << 31) - 1)
WAY_BITS, WAYS = tl.constexpr(4), tl.constexpr(16)
ROUNDS = 8  # of WAY_BITS bits each
ABOVE, BETWEEN, FULL = (tl.constexpr(number) for number in range(3))  # counted: keys above, keys between, overflows
COUNTED = tl.constexpr(4)
LANES = 1024  # coordinates per iteration; most stored keys of a block; bytes count to BLOCK / LANES
ALIGNED = 16  # bytes per load of a thread


class BlockTable(NamedTuple):
    """Tensors in blocks, on a GPU.

    tensors: int64 [T, COLUMNS].
    blocks: int64 [B, 2]: the tensor, and the block's first coordinate.
    samples: int64 [P, 2]: the tensor, and the first entry of a part of its sample.
    wanted: number of wanted entries of all tensors.
    """

    tensors: Tensor
    blocks: Tensor
    samples: Tensor
    wanted: int


@functools.lru_cache(maxsize=KEPT)
def blocks_on(numels: tuple[int, ...], wanted: tuple[int, ...], device: torch.device) -> BlockTable:
    """Return blocks of tensors with at least one wanted entry; cached."""
    n, k = np.array(numels, np.int64), np.array(wanted, np.int64)
    step = np.clip(n // SAMPLE, 1, SPARSEST) | 1  # odd, since tensors often have patterns of even periods
    sectors = -(-n // (step * SECTOR.value))
    seen = (sectors - 1) * SECTOR.value + np.minimum(SECTOR.value, n - (sectors - 1) * step * SECTOR.value)
    counts = np.where(k > 0, -(-n // BLOCK.value), 0)
    ranks = np.array([_ranks(*one) for one in zip(n.tolist(), k.tolist(), seen.tolist(), strict=True)], np.int64)
    sampled = sectors * SECTOR.value
    columns = [n, k, k.cumsum() - k, counts, counts.cumsum() - counts, sampled, step, *ranks.T]
    return BlockTable(
        upload.table(torch.from_numpy(np.stack(columns, axis=1)), device),
        parts_on(tuple(counts.tolist()), BLOCK.value, device),
        parts_on(tuple(np.where(k > 0, -(-sampled // BLOCK.value), 0).tolist()), BLOCK.value, device),
        int(k.sum()),
    )


def _ranks(n: int, k: int, seen: int) -> tuple[int, int]:
    """Return ranks in a sample of `seen` of n entries, whose keys are expected to enclose the k-th largest of all."""
    if seen >= n:
        return k, k
    expected = k * seen / n
    margin = DEVIATIONS * math.sqrt(expected * (1 - k / n)) + DEVIATIONS
    return math.ceil(expected + margin), max(0, math.floor(expected - margin))


class Entries(NamedTuple):
    """Selected entries, ordered by tensor and index.

    indices: indices within the tensor, int32 [W, K].
    values: float32 [W, K].
    """

    indices: Tensor
    values: Tensor


def largest(addresses: np.ndarray, numels: tuple[int, ...], wanted: tuple[int, ...], like: Tensor) -> Entries:
    """Return the largest magnitudes of each tensor.

    Args:
        addresses: addresses of the coordinates, int64 [W, T].
        numels, wanted: number of coordinates of each tensor, at most 2^30, and of entries, at most all.
        like: tensor with the dtype and the device of the coordinates.
    """
    there, (W, T) = like.device, addresses.shape
    parts = blocks_on(numels, wanted, there)
    found = Entries(*(torch.empty(W, parts.wanted, dtype=kind, device=there) for kind in (torch.int32, torch.float32)))
    if not parts.wanted:
        return found
    constants = {"TYPE": TYPES[like.dtype], "LANES": LANES, "VECTOR": vector_of(addresses, like)}
    given = (upload.upload(torch.from_numpy(addresses), there), T, parts.tensors)
    B, rounds = len(parts.blocks), ROUNDS * W * T * WAYS.value
    sizes = [2 * rounds, rounds, W * T * COUNTED.value, W * B]
    of_samples, counts, totals, places = torch.zeros(sum(sizes), dtype=torch.int32, device=there).split(sizes)
    bounds = _search(of_samples, (W, T, 2))
    on_samples = {name: constants[name] for name in ("TYPE", "LANES")}
    for number in range(ROUNDS):
        grid, state = (len(parts.samples), W, 2), (*bounds, 2 * W * T, number)
        launch(_narrow_in_sample, grid, there, *given, *state, parts.samples, **on_samples)
    aside = torch.empty(W, B, LANES, dtype=torch.int32, device=there)
    of_blocks = torch.empty(W, 2, B, dtype=torch.int32, device=there)
    between = torch.empty(W, T, 2, dtype=torch.int32, device=there)
    shared = (parts.blocks, B, aside, of_blocks, totals, between)
    launch(_put_aside, (B, W), there, *given, bounds[0][-1], bounds[1][-1], *shared, places, **constants)
    search = _search(counts, (W, T, 1))
    for number in range(ROUNDS):
        launch(_narrow, (B, W), there, *given, *search, W * T, number, *shared, **constants)
    tally = torch.empty(W, 2, B, dtype=torch.int32, device=there)
    last = torch.empty(W, T, dtype=torch.int32, device=there)
    launch(_tally, (B, W), there, *given, search[0][-1], search[1][-1], *shared, tally, last, **constants)
    until = tally.cumsum(2, dtype=torch.int32)
    launch(_gather, (B, W), there, *given, parts.blocks, B, until, last, *found, parts.wanted, **constants)
    return found


def vector_of(addresses: np.ndarray, like: Tensor) -> int:
    """Return the number of elements per load for tensors at these addresses."""
    return 1 if (addresses % ALIGNED).any() else ALIGNED // like.element_size()


def _search(counts: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Return the states and the counts of a radix search of shape (W, T, sides); `counts` are zeros.

    states: for each round, the lowest possible key and the rank among the keys with the same higher digits, int32
        [rounds, W, T, sides, 2].
    counts: counts of the digits of each round, int32 [rounds, W, T, sides, WAYS].
    """
    states = torch.empty(ROUNDS, *shape, 2, dtype=torch.int32, device=counts.device)
    return states, counts.view(ROUNDS, *shape, WAYS.value)


@triton.jit
def key_of(number):  # type: ignore[no-untyped-def]
    """Bits of |x| as float32, int32."""
    return number.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def narrowed(states, counts, at, shift):  # type: ignore[no-untyped-def]
    """Lowest possible key after a round, and the rank among the remaining keys."""
    low, rank = tl.load(states + 2 * at), tl.load(states + 2 * at + 1)
    digit = tl.arange(0, WAYS)
    count = tl.load(counts + at * WAYS + digit)
    reached = tl.sum(count, axis=0) - tl.cumsum(count, axis=0) + count
    found = tl.max(tl.where(reached >= rank, digit, 0), axis=0)
    return low + (found << shift), rank - tl.sum(tl.where(digit > found, count, 0), axis=0)


@triton.jit
def one_in(keys, low, most, shift):  # type: ignore[no-untyped-def]
    """A one in the byte of the digit of each key in [low, most], uint64: for digits below 8, and from 8 on."""
    digit = ((keys - low) >> shift).to(tl.uint64)
    one = tl.where((keys >= low) & (keys <= most), 1, 0).to(tl.uint64) << ((digit & 7) * 8)
    return tl.where(digit < 8, one, 0), tl.where(digit < 8, 0, one)


@triton.jit
def add_counts(counts, at, ones, digits):  # type: ignore[no-untyped-def]
    """Add bytes, one per digit of 8, to the counts of a tensor."""
    i = tl.arange(0, 8)
    each = (ones[:, None] >> (8 * i).to(tl.uint64)[None, :]).to(tl.int32) & 0xFF
    tl.atomic_add(counts + at * WAYS + digits + i, tl.sum(each, axis=0), sem="relaxed")


@triton.jit
def numbers_at(x, j, n, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Coordinates j below n, VECTOR per load; elements beyond n are loaded only within the same 16 bytes."""
    return tl.load(x + j, mask=j < (n + VECTOR - 1) // VECTOR * VECTOR, other=0)


@triton.jit
def keys_at(x, j, n, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys of coordinates; -1 for j >= n."""
    return tl.where(j < n, key_of(numbers_at(x, j, n, VECTOR)), -1)


@triton.jit
def keys_aside(aside, of_blocks, B, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stored keys of the block of a program, padded with -1."""
    b, w, i = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.arange(0, LANES)
    some = tl.load(of_blocks + (w * 2 + BETWEEN) * B + b)
    return tl.load(aside + (w * B + b) * LANES + i, mask=i < some, other=-1)


@triton.jit
def block_of(addresses, T, rows, blocks, TYPE: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Block of a program: tensor, first coordinate, address, number of coordinates."""
    b, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t, begin = tl.load(blocks + 2 * b), tl.load(blocks + 2 * b + 1)
    x = tl.load(addresses + w * T + t).to(tl.pointer_type(TYPE)) + begin
    x = tl.multiple_of(x, VECTOR * (TYPE.primitive_bitwidth // 8))
    n = tl.minimum(tl.load(rows + t * COLUMNS + N) - begin, BLOCK).to(tl.int32)
    return t, begin, x, n


@triton.jit
def bits_of(number):  # type: ignore[no-untyped-def]
    """Bit length of a non-negative number."""
    return tl.sum((number >> tl.arange(0, 32) > 0).to(tl.int32), axis=0)


@triton.jit
def held(totals, between, at, wanted):  # type: ignore[no-untyped-def]
    """State of the search of a tensor after the read of all coordinates.

    Returns the lowest and the highest possible key of the last selected entry, its rank among keys in this range, and
    their location: 0 in the tensor, 1 stored, 2 all equal.
    """
    above, some = tl.load(totals + at * COUNTED + ABOVE), tl.load(totals + at * COUNTED + BETWEEN)
    full = tl.load(totals + at * COUNTED + FULL) > 0
    low, most = tl.load(between + 2 * at), tl.load(between + 2 * at + 1)
    right = (above < wanted) & (above + some >= wanted)
    where = tl.where(right, tl.where(low == most, 2, tl.where(full, 0, 1)), 0)
    return tl.where(right, low, 0), tl.where(right, most, HIGHEST), tl.where(right, wanted - above, wanted), where


@triton.jit(do_not_specialize=["number"])
def _narrow_in_sample(  # type: ignore[no-untyped-def]
    addresses, T, rows, states, counts, size, number, samples, TYPE: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    p, w, side = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    t, begin = tl.load(samples + 2 * p), tl.load(samples + 2 * p + 1)
    row, at = rows + t * COLUMNS, number * size + (w * T + t) * 2 + side
    left = KEY_BITS - WAY_BITS * number
    low, rank = tl.zeros([], tl.int32), tl.load(row + RANK + side).to(tl.int32)
    if number > 0:
        low, rank = narrowed(states, counts, at - size, left)
    tl.store(states + 2 * at, low, mask=begin == 0)
    tl.store(states + 2 * at + 1, rank, mask=begin == 0)
    most, shift = low + (HIGHEST >> (KEY_BITS - left)), tl.maximum(left - WAY_BITS, 0)
    n, step = tl.load(row + N), tl.load(row + STEP)
    x = tl.load(addresses + w * T + t).to(tl.pointer_type(TYPE))
    few, many = tl.zeros([LANES], tl.uint64), tl.zeros([LANES], tl.uint64)
    for start in range(0, tl.minimum(tl.load(row + SAMPLED) - begin, BLOCK).to(tl.int32), LANES):
        q = begin + start + tl.arange(0, LANES)
        place = q // SECTOR * SECTOR * step + q % SECTOR
        key = tl.where(place < n, key_of(tl.load(x + place, mask=place < n, other=0)), -1)
        below, others = one_in(key, low, most, shift)
        few += below
        many += others
    add_counts(counts, at, few, 0)
    add_counts(counts, at, many, 8)


@triton.jit
def _put_aside(  # type: ignore[no-untyped-def]
    addresses, T, rows, states, counts, blocks, B, aside, of_blocks, totals, between, places,
    TYPE: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    b, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t, begin, x, n = block_of(addresses, T, rows, blocks, TYPE, VECTOR)
    at = w * T + t
    least, _ = narrowed(states, counts, 2 * at, 0)
    most, _ = narrowed(states, counts, 2 * at + 1, 0)
    most = tl.where(tl.load(rows + t * COLUMNS + RANK + 1) > 0, most, HIGHEST)
    tl.store(between + 2 * at, least, mask=begin == 0)
    tl.store(between + 2 * at + 1, most, mask=begin == 0)
    size = tl.where(least < most, LANES, 0)  # equal keys need not be stored
    own, taken = aside + (w * B + b) * LANES, places + w * B + b
    zero = tl.zeros([LANES], tl.int32)
    both = zero
    for start in range(0, n, LANES):
        key = keys_at(x, start + tl.arange(0, LANES), n, VECTOR)
        inside = (key >= least) & (key <= most)
        both += (key > most).to(tl.int32) + (inside.to(tl.int32) << 16)
        # the order of stored keys does not matter
        apart = inside & (zero < size)
        place = tl.atomic_add(taken + zero, 1, mask=apart, sem="relaxed")
        tl.store(own + place, key, mask=apart & (place < size))
    total = tl.sum(both, axis=0)
    above, some = total & 0xFFFF, total >> 16
    tl.store(of_blocks + (w * 2 + ABOVE) * B + b, above)
    tl.store(of_blocks + (w * 2 + BETWEEN) * B + b, some)
    tl.atomic_add(totals + at * COUNTED + ABOVE, above, sem="relaxed")
    tl.atomic_add(totals + at * COUNTED + BETWEEN, some, sem="relaxed")
    tl.atomic_add(totals + at * COUNTED + FULL, 1, mask=(some > size) & (size > 0), sem="relaxed")


@triton.jit(do_not_specialize=["number"])
def _narrow(  # type: ignore[no-untyped-def]
    addresses, T, rows, states, counts, size, number, blocks, B, aside, of_blocks, totals, between,
    TYPE: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    w = tl.program_id(1).to(tl.int64)
    t, begin, x, n = block_of(addresses, T, rows, blocks, TYPE, VECTOR)
    at = w * T + t
    low, most, rank, where = held(totals, between, at, tl.load(rows + t * COLUMNS + WANTED).to(tl.int32))
    left, at = bits_of(most - low) - WAY_BITS * number, number * size + at
    if number > 0:
        low, rank = narrowed(states, counts, at - size, tl.maximum(left, 0))
    tl.store(states + 2 * at, low, mask=begin == 0)
    tl.store(states + 2 * at + 1, rank, mask=begin == 0)
    if left > 0:
        most = low + tl.minimum(most - low, HIGHEST >> (KEY_BITS - left))
        shift = tl.maximum(left - WAY_BITS, 0)
        few, many = tl.zeros([LANES], tl.uint64), tl.zeros([LANES], tl.uint64)
        if where == 1:
            few, many = one_in(keys_aside(aside, of_blocks, B, LANES), low, most, shift)
        else:
            for start in range(0, n, LANES):
                below, others = one_in(keys_at(x, start + tl.arange(0, LANES), n, VECTOR), low, most, shift)
                few += below
                many += others
        add_counts(counts, at, few, 0)
        add_counts(counts, at, many, 8)


@triton.jit
def _tally(  # type: ignore[no-untyped-def]
    addresses, T, rows, states, counts, blocks, B, aside, of_blocks, totals, between, tally, last,
    TYPE: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    b, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t, begin, x, n = block_of(addresses, T, rows, blocks, TYPE, VECTOR)
    at = w * T + t
    _, _, _, where = held(totals, between, at, tl.load(rows + t * COLUMNS + WANTED).to(tl.int32))
    key, _ = narrowed(states, counts, at, 0)
    tl.store(last + at, key, mask=begin == 0)
    larger, equal = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    if where > 0:
        larger += tl.load(of_blocks + (w * 2 + ABOVE) * B + b)
        if where == 1:
            keys = keys_aside(aside, of_blocks, B, LANES)
            larger += tl.sum((keys > key).to(tl.int32), axis=0)
            equal += tl.sum((keys == key).to(tl.int32), axis=0)
        else:
            equal += tl.load(of_blocks + (w * 2 + BETWEEN) * B + b)
    else:
        for start in range(0, n, LANES):
            keys = keys_at(x, start + tl.arange(0, LANES), n, VECTOR)
            larger += tl.sum((keys > key).to(tl.int32), axis=0)
            equal += tl.sum((keys == key).to(tl.int32), axis=0)
    tl.store(tally + (w * 2) * B + b, larger)
    tl.store(tally + (w * 2 + 1) * B + b, equal)


@triton.jit
def before(until, b):  # type: ignore[no-untyped-def]
    """Exclusive prefix sum at b, from inclusive ones."""
    return tl.load(until + b - 1, mask=b > 0, other=0)


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    addresses, T, rows, blocks, B, until, last, indices, values, K,
    TYPE: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    b, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t, begin, x, n = block_of(addresses, T, rows, blocks, TYPE, VECTOR)
    row = rows + t * COLUMNS
    first, end = tl.load(row + FIRST_BLOCK), tl.load(row + FIRST_BLOCK) + tl.load(row + BLOCKS)
    larger, equal = until + (w * 2) * B, until + (w * 2 + 1) * B
    ties = tl.load(row + WANTED).to(tl.int32) - (before(larger, end) - before(larger, first))
    rank, tied = before(larger, b) - before(larger, first), before(equal, b) - before(equal, first)
    key = tl.load(last + w * T + t)
    out = w * K + tl.load(row + FIRST)
    for start in range(0, n, LANES):
        j = start + tl.arange(0, LANES)
        number = numbers_at(x, j, n, VECTOR).to(tl.float32)
        own = tl.where(j < n, key_of(number), -1)
        both = (own > key).to(tl.int32) + ((own == key).to(tl.int32) << 16)
        sums = tl.cumsum(both, axis=0) - both
        tied_before = tied + (sums >> 16)
        taken = (own > key) | ((own == key) & (tied_before < ties))
        place = rank + (sums & 0xFFFF) + tl.minimum(tied_before, ties)
        tl.store(indices + out + place, begin.to(tl.int32) + j, mask=taken)
        tl.store(values + out + place, number, mask=taken)
        total = tl.sum(both, axis=0)
        rank += total & 0xFFFF
        tied += total >> 16
