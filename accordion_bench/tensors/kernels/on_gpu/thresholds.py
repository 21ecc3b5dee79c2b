"""Selection of entries that reach a given threshold, or one estimated from a sample. The host does not synchronise.

`selection` first lists the largest magnitudes of each tensor, one more than may be sent. A sample's keys, descending,
are candidate thresholds. A search finds for each listed key the highest threshold that it reaches. Sums of these are
the counts at all thresholds, from which one program per tensor chooses. Of too many entries exactly the largest are
selected. The result is all keys above a smallest one, and the first ones of those equal to it.

Tensor suffixes: W workers, T tensors, B blocks, L listed entries, M thresholds, K entries of all tensors.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from accordion_bench.tensors.kernels.on_gpu.launch import TYPES, launch, parts_on
from accordion_bench.tensors.kernels.on_gpu.selection import (
    BLOCK,
    HIGHEST,
    LANES,
    Entries,
    before,
    key_of,
    numbers_at,
    vector_of,
)
from accordion_bench.tensors.upload import upload

COLUMNS = tl.constexpr(12)
FIRST, COUNT, CUT, MOST, LEAST, BITS, START, STEP, SAMPLED, RANK, FIRST_TRIED, TRIED = (
    tl.constexpr(column) for column in range(COLUMNS.value)
)
"""Columns of a tensor: listed entries of previous tensors, and its own; numbers of `WantedEntries`; first coordinate,
stride and size of its sample; first rank to try; thresholds of previous tensors, and its own."""
TINY = tl.constexpr(1 << 23)  # bits of the smallest normal float32: no zeros are sent
WARPS = 8


class WantedEntries(NamedTuple):
    """Parameters of the selection of one tensor.

    cut: number of entries if more than `most` reach the threshold, or if no entry of the sample is low enough.
    most: largest number of entries that may reach the threshold.
    bits: bits of a given threshold.
    least: smallest number of entries that must reach the threshold; with fewer it is lowered.
    sample: coordinates whose magnitudes are candidates for the threshold; empty = the threshold is given.
    rank: rank in the sample of the first candidate, from 1 on.
    """

    cut: int
    most: int
    bits: int = 0
    least: int = 0
    sample: range = range(0)
    rank: int = 1

    def listed(self, n: int) -> int:
        """Number of largest of n entries to list; one more than `most` shows that too many reach the threshold."""
        return min(n, self.most + bool(self.sample))


class ReachedEntries(NamedTuple):
    """Selection of entries from a smallest key on, see `codecs.selection.Selection`.

    source: arguments of kernels for the candidates: listed indices and values, or addresses of tensors.
    constants: constants of kernels for that source.
    blocks: blocks of the source, int64 [B, 2].
    ends: smallest key of each tensor, and last selected index among keys equal to it, int32 [W, T, 2].
    until: inclusive prefix sums of the selected entries per block, int32 [W, B].
    counts_W: number of selected entries of each tensor, int32 [W, T].
    """

    source: tuple[Any, ...]
    constants: dict[str, Any]
    blocks: Tensor
    ends: Tensor
    until: Tensor
    counts_W: Tensor


def from_thresholds(
    listed: Entries, addresses: np.ndarray, wanted: Sequence[WantedEntries], counts: Sequence[int], like: Tensor
) -> ReachedEntries:
    """Select the entries of each tensor that reach a threshold.

    Args:
        listed, counts: largest entries of each tensor, and their numbers, see `WantedEntries.listed`.
        addresses, like: as for `selection.largest`.
        wanted: parameters for each tensor.
    """
    there, (W, T), L = like.device, addresses.shape, listed.indices.shape[1]
    tried = [max(1, len(own.sample)) for own in wanted]
    columns = [(0, count, own.cut, own.most, own.least, own.bits) for own, count in zip(wanted, counts, strict=True)]
    samples = [(own.sample.start, own.sample.step, len(own.sample), own.rank, 0) for own in wanted]
    table = np.column_stack([columns, samples, tried]).astype(np.int64)
    for first, of in ((FIRST, COUNT), (FIRST_TRIED, TRIED)):
        table[:, first.value] = table[:, of.value].cumsum() - table[:, of.value]
    M = sum(tried)
    both = upload(torch.from_numpy(np.concatenate([addresses.ravel(), table.ravel()])), there)
    given, rows = both[: W * T], both[W * T :]
    thresholds = torch.empty(W, M, dtype=torch.int64, device=there)
    parts = parts_on(tuple(-(-some // LANES) for some in tried), LANES, there)
    to, constants = (thresholds, M), {"LANES": LANES}
    launch(_sample, (len(parts), W), there, given, T, rows, parts, *to, TYPE=TYPES[like.dtype], **constants)
    thresholds = thresholds.sort(dim=1).values
    blocks = parts_on(tuple(-(-count // BLOCK.value) for count in counts), BLOCK.value, there)
    reaching = torch.zeros(W, M, dtype=torch.int32, device=there)
    constants["STEPS"] = max(tried).bit_length()
    launch(_count, (len(blocks), W), there, listed.values, L, rows, blocks, thresholds, reaching, M, **constants)
    ends = torch.empty(W, T, 2, dtype=torch.int32, device=there)
    found = (thresholds, reaching.cumsum(1, dtype=torch.int32), M, ends)
    launch(_decide, (T, W), there, *listed, L, rows, T, *found, LANES=LANES, num_warps=WARPS)
    return _reached((*listed, L, rows), {"LISTED": True, "TYPE": tl.float32, "VECTOR": 1}, blocks, ends)


def not_zero(rows_W: Sequence[Tensor], addresses: np.ndarray) -> ReachedEntries:
    """Select the non-zero entries of tensors [W, N] at addresses [W, T]."""
    like, (W, T), numels = rows_W[0], addresses.shape, [x_W.shape[1] for x_W in rows_W]
    there = like.device
    blocks = parts_on(tuple(-(-n // BLOCK.value) for n in numels), BLOCK.value, there)
    numbers = np.concatenate([addresses.ravel(), np.array(numels, np.int64)])
    both = upload(torch.from_numpy(numbers), there)
    ends = torch.empty(W, T, 2, dtype=torch.int32, device=there)
    ends[..., 0], ends[..., 1] = 1, HIGHEST.value
    source = (both[: W * T], both[: W * T], T, both[W * T :])
    constants = {"LISTED": False, "TYPE": TYPES[like.dtype], "VECTOR": vector_of(addresses, like)}
    return _reached(source, constants, blocks, ends)


def _reached(source: tuple[Any, ...], constants: dict[str, Any], blocks: Tensor, ends: Tensor) -> ReachedEntries:
    (W, T), B, there = ends.shape[:2], len(blocks), ends.device
    sent, counts = torch.zeros(W * (B + T), dtype=torch.int32, device=there).split([W * B, W * T])
    of = (blocks, B, ends, T)
    launch(_tally, (B, W), there, *source, *of, sent, counts, **constants, LANES=LANES)
    until = sent.view(W, B).cumsum(1, dtype=torch.int32)
    return ReachedEntries(source, constants, blocks, ends, until, counts.view(W, T))


def entries_of(reached: ReachedEntries, most: int) -> Entries:
    """Return the selected entries, at most `most` per worker, ordered by tensor and index; the rest is undefined."""
    (W, B), there = reached.until.shape, reached.until.device
    found = Entries(*(torch.empty(W, most, dtype=kind, device=there) for kind in (torch.int32, torch.float32)))
    args = (*reached.source, reached.blocks, B, reached.ends, reached.ends.shape[1], reached.until, *found, most)
    launch(_compact, (B, W), there, *args, **reached.constants, LANES=LANES)
    return found


@triton.jit
def _sample(addresses, T, rows, parts, out, M, TYPE: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    p, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t, begin = tl.load(parts + 2 * p), tl.load(parts + 2 * p + 1)
    row, i = rows + t * COLUMNS, begin + tl.arange(0, LANES)
    sampled = tl.load(row + SAMPLED)
    x = tl.load(addresses + w * T + t).to(tl.pointer_type(TYPE)) + tl.load(row + START)
    key = key_of(tl.load(x + i * tl.load(row + STEP), mask=i < sampled, other=0)).to(tl.int64)
    key = tl.where(sampled > 0, tl.maximum(key, TINY), tl.load(row + BITS))
    tl.store(out + w * M + tl.load(row + FIRST_TRIED) + i, (t << 32) - key, mask=i < tl.load(row + TRIED))


@triton.jit
def _count(  # type: ignore[no-untyped-def]
    values, L, rows, blocks, thresholds, reaching, M, STEPS: tl.constexpr, LANES: tl.constexpr
):
    b, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t, begin = tl.load(blocks + 2 * b), tl.load(blocks + 2 * b + 1)
    row = rows + t * COLUMNS
    own, n = values + w * L + tl.load(row + FIRST) + begin, tl.load(row + COUNT) - begin
    m, first = tl.load(row + TRIED).to(tl.int32), w * M + tl.load(row + FIRST_TRIED)
    for start in range(0, tl.minimum(n, BLOCK).to(tl.int32), LANES):
        j = start + tl.arange(0, LANES)
        sought = (t << 32) - key_of(tl.load(own + j, mask=j < n, other=0)).to(tl.int64)
        above = tl.zeros([LANES], tl.int32)  # number of thresholds above the key
        for k in tl.static_range(STEPS):
            step = above + (1 << (STEPS - 1 - k))
            higher = tl.load(thresholds + first + step - 1, mask=step <= m, other=0) < sought
            above = tl.where((step <= m) & higher, step, above)
        reaches = (j < n) & (above < m)
        least, most = tl.min(tl.where(reaches, above, m), axis=0), tl.max(tl.where(reaches, above, -1), axis=0)
        if least == most:  # all keys reach the same threshold
            tl.atomic_add(reaching + first + least, tl.sum(reaches.to(tl.int32), axis=0), sem="relaxed")
        else:
            tl.atomic_add(reaching + first + above, 1, mask=reaches, sem="relaxed")


@triton.jit
def _keys_listed(values, indices, at, j, n):  # type: ignore[no-untyped-def]
    """Keys of listed entries, -1 for missing ones, and their indices."""
    exists = j < n
    key = tl.where(exists, key_of(tl.load(values + at + j, mask=exists, other=0)), -1)
    return key, tl.load(indices + at + j, mask=exists, other=0)


@triton.jit
def _decide(  # type: ignore[no-untyped-def]
    indices, values, L, rows, T, thresholds, until, M, ends, LANES: tl.constexpr
):
    t, w = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = rows + t * COLUMNS
    first, tried = w * M + tl.load(row + FIRST_TRIED), tl.load(row + TRIED)
    already = before(until + w * M, tl.load(row + FIRST_TRIED))
    cut, least, j = tl.load(row + CUT), tl.load(row + LEAST), tl.load(row + RANK) - 1
    found = (tl.load(until + first + j) - already).to(tl.int64)
    key = (t << 32) - tl.load(thresholds + first + j)
    while (found < least) & (key > TINY) & (j < tried - 1):
        some = tl.maximum(found, 1)
        j = tl.minimum(tl.maximum(j + 1, ((j + 1) * cut + some - 1) // some - 1), tried - 1)
        found = (tl.load(until + first + j) - already).to(tl.int64)
        key = (t << 32) - tl.load(thresholds + first + j)
    enough = (found >= least) | (key <= TINY)
    key, last = key.to(tl.int32), tl.full([], HIGHEST, tl.int32)
    if (enough & (found <= tl.load(row + MOST))) == 0:
        n, at = tl.load(row + COUNT).to(tl.int32), w * L + tl.load(row + FIRST)
        key, last = _exactly(values, indices, at, n, cut.to(tl.int32), LANES)
    tl.store(ends + 2 * (w * T + t), key)
    tl.store(ends + 2 * (w * T + t) + 1, last)


@triton.jit
def _exactly(values, indices, at, n, wanted, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Key of the last of the `wanted` largest, by two bits per round, and the last selected index equal to it."""
    key, more = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for number in range(16):
        shift = 30 - 2 * number
        one, two, three = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32)
        for start in range(0, n, LANES):
            own, _ = _keys_listed(values, indices, at, start + tl.arange(0, LANES), n)
            digit = tl.where(own >= key, (own - key) >> shift, 0)
            one += (digit >= 1).to(tl.int32)
            two += (digit >= 2).to(tl.int32)
            three += (digit >= 3).to(tl.int32)
        ones, twos, threes = tl.sum(one, axis=0), tl.sum(two, axis=0), tl.sum(three, axis=0)
        digit = (ones >= wanted).to(tl.int32) + (twos >= wanted).to(tl.int32) + (threes >= wanted).to(tl.int32)
        more = tl.where(digit == 0, ones, tl.where(digit == 1, twos, tl.where(digit == 2, threes, more)))
        key += digit << shift
    tied, last = wanted - more, tl.full([], -1, tl.int32)
    for start in range(0, n, LANES):
        own, index = _keys_listed(values, indices, at, start + tl.arange(0, LANES), n)
        equal = (own == key).to(tl.int32)
        inside = (equal > 0) & (tl.cumsum(equal, axis=0) <= tied)
        last = tl.maximum(last, tl.max(tl.where(inside, index, -1), axis=0))
        tied -= tl.sum(equal, axis=0)
    return key, last


@triton.jit
def _entries(  # type: ignore[no-untyped-def]
    first, second, size, rows, t, w, begin, LISTED: tl.constexpr, TYPE: tl.constexpr, VECTOR: tl.constexpr
):
    """Addresses of the values and of the listed indices of a block, and its number of entries."""
    if LISTED:
        row = rows + t * COLUMNS
        at = w * size + tl.load(row + FIRST) + begin
        return second + at, first + at, tl.minimum(tl.load(row + COUNT) - begin, BLOCK).to(tl.int32)
    else:
        x = tl.load(first + w * size + t).to(tl.pointer_type(TYPE)) + begin
        x = tl.multiple_of(x, VECTOR * (TYPE.primitive_bitwidth // 8))
        return x, rows, tl.minimum(tl.load(rows + t) - begin, BLOCK).to(tl.int32)


@triton.jit
def _sent(numbers, indices, begin, j, n, key, last, LISTED: tl.constexpr, VECTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values, indices, and which are selected."""
    number = numbers_at(numbers, j, n, VECTOR).to(tl.float32)
    if LISTED:
        index = tl.load(indices + j, mask=j < n, other=0)
    else:
        index = begin.to(tl.int32) + j
    own = tl.where(j < n, key_of(number), -1)
    return number, index, (own > key) | ((own == key) & (index <= last))


@triton.jit
def _tally(  # type: ignore[no-untyped-def]
    first, second, size, rows, blocks, B, ends, T, sent, counts,
    LISTED: tl.constexpr, TYPE: tl.constexpr, VECTOR: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    b, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t, begin = tl.load(blocks + 2 * b), tl.load(blocks + 2 * b + 1)
    numbers, indices, n = _entries(first, second, size, rows, t, w, begin, LISTED, TYPE, VECTOR)
    at = w * T + t
    key, last = tl.load(ends + 2 * at), tl.load(ends + 2 * at + 1)
    total = tl.zeros([LANES], tl.int32)
    for start in range(0, n, LANES):
        j = start + tl.arange(0, LANES)
        _, _, taken = _sent(numbers, indices, begin, j, n, key, last, LISTED, VECTOR)
        total += taken.to(tl.int32)
    some = tl.sum(total, axis=0)
    tl.store(sent + w * B + b, some)
    tl.atomic_add(counts + at, some, sem="relaxed")


@triton.jit
def _compact(  # type: ignore[no-untyped-def]
    first, second, size, rows, blocks, B, ends, T, until, indices_out, values_out, K,
    LISTED: tl.constexpr, TYPE: tl.constexpr, VECTOR: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    b, w = tl.program_id(0), tl.program_id(1).to(tl.int64)
    t, begin = tl.load(blocks + 2 * b), tl.load(blocks + 2 * b + 1)
    numbers, indices, n = _entries(first, second, size, rows, t, w, begin, LISTED, TYPE, VECTOR)
    at = w * T + t
    key, last = tl.load(ends + 2 * at), tl.load(ends + 2 * at + 1)
    rank, out = before(until + w * B, b), w * K
    for start in range(0, n, LANES):
        j = start + tl.arange(0, LANES)
        number, index, taken = _sent(numbers, indices, begin, j, n, key, last, LISTED, VECTOR)
        one = taken.to(tl.int32)
        place = out + rank + tl.cumsum(one, axis=0) - one
        tl.store(indices_out + place, index, mask=taken)
        tl.store(values_out + place, number, mask=taken)
        rank += tl.sum(one, axis=0)
