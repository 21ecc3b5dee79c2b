"""Keyed random numbers: a draw depends on its key only, neither on earlier draws nor on the global generator.

Counter-based random bits: value i of a stream depends on the key and i only, so that chunks of a tensor get the same
numbers for any partition and on any device. Counters are partitioned into blocks. A table contains a hashed word for
each lane of a block. splitmix64 (Steele, Lea, Flood 2014) computes a word and an odd factor from (key, block), and
value = (word of the lane xor word of the block) x factor modulo 2^32, two vector operations. As in any product, only
the leading bits are random. Two blocks form pairs (a z, b z) with random factors a and b, a lattice that is too fine to
be observed unless a and b are tiny.
"""

import contextlib
import functools
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.upload import table, upload

BLOCK = 4096  # numbers of a block
FEW = 128  # from this ratio of n to k on, sorting the drawn numbers costs less than marking all

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def key(*parts: object) -> int:
    """Return a 63-bit seed from the parts, e.g. `key(seed, "dropout", step, worker)`; equal on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def opened(*parts: object) -> bytes:
    """Return the common prefix of keys that begin with these parts, at least two; see `closed`."""
    return repr(parts)[:-1].encode()


def closed(beginnings: Sequence[bytes], *parts: object) -> list[int]:
    """Return `key(*first, *parts)` for each prefix of `opened(*first)`."""
    end = f", {', '.join(map(repr, parts))})".encode()
    digests = [hashlib.blake2b(first + end, digest_size=8).digest() for first in beginnings]
    return [int.from_bytes(digest, "little") >> 1 for digest in digests]


def generator(*parts: object) -> torch.Generator:
    """Return a CPU generator for one key; draw on the CPU and copy, so that CPU and GPU runs get the same numbers."""
    return torch.Generator().manual_seed(key(*parts))


@contextlib.contextmanager
def kept_rng(device: torch.device | str = "cpu") -> Iterator[None]:
    """Restore the state of torch's global generators on exit."""
    device = torch.device(device)
    cpu = torch.get_rng_state()
    gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, device)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global CPU generator inside the block, and restore its state on exit."""
    with kept_rng():
        torch.default_generator.manual_seed(seed)
        yield


def draw_distinct(n: int, k: int, generator: torch.Generator) -> Tensor:
    """Return k ascending integers below n, uniform over all sets of k.

    The result is the first k distinct values of a stream of independent draws. Each round draws at most the missing
    number of values, so that no value is discarded. For k > n/2 the n - k others are drawn, which needs few rounds.
    """
    wanted = min(k, n - k)

    def draw(missing: int) -> Tensor:
        return torch.empty(missing, dtype=torch.int64).random_(generator=generator) % n  # of 63 bits: bias n / 2^63

    if FEW * k < n:  # no work is proportional to n
        found = torch.empty(0, dtype=torch.int64)
        while len(found) < k:
            found = torch.cat([found, draw(k - len(found))]).sort().values.unique_consecutive()
        return found
    hit = np.zeros(n, bool)
    count = 0
    while count < wanted:
        hit[draw(wanted - count).numpy()] = True
        count = int(np.count_nonzero(hit))
    return torch.from_numpy(np.flatnonzero(hit if wanted == k else ~hit))


# ---- counter-based random bits


def blocks_of(keys_R: Sequence[Sequence[int]], counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the keys of blocks for `fill_bits_`: an int32 word and odd factor, [R, sum of counts, 2].

    Blocks of a row are ordered by stream.

    Args:
        keys_R: one key per stream, for each row.
        counts: number of blocks of each stream.
        device: device of the result.
    """
    streams = np.repeat(np.stack([streams_of(keys) for keys in keys_R]), counts, axis=1)
    z = streams + np.concatenate([np.arange(count, dtype=np.uint64) for count in counts])
    words = hashed(z).view(np.uint32).reshape(*z.shape, 2)
    words[..., 1] = words[..., 1] & ~np.uint32(7) | np.uint32(5)
    return upload(torch.from_numpy(words.view(np.int32)), device)


def integers_of(blocks: Tensor, bits: int) -> Tensor:
    """Return random integers below 2^bits, int32 [..., blocks x BLOCK], for keys of blocks [..., blocks, 2]."""
    rows = blocks.flatten(0, -3)
    words = fill_bits_(torch.empty(len(rows), rows.shape[1] * BLOCK, dtype=torch.int32, device=rows.device), rows)
    return (
        words.bitwise_right_shift_(32 - bits)
        .bitwise_and_((1 << bits) - 1)
        .view(*blocks.shape[:-2], rows.shape[1] * BLOCK)
    )


def streams_of(keys: Sequence[int]) -> np.ndarray:
    """Return the first counter of the stream of each key, uint64."""
    # the key is hashed, so that streams of adjacent keys do not overlap
    return hashed(np.array([key & 0xFFFFFFFFFFFFFFFF for key in keys], np.uint64))


def hashed(z: np.ndarray) -> np.ndarray:
    """Hash 64-bit numbers by splitmix64."""
    z = (z + np.uint64(1)) * _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def fill_bits_(out_R: Tensor, keys_R: Tensor) -> Tensor:
    """Fill int32 [R, N], N at most blocks x BLOCK, with the words of the blocks of `keys_R` [R, blocks, 2].

    Only the leading bits of the words are random.
    """
    n = out_R.shape[1]
    whole = n // BLOCK
    if whole:
        _fill(out_R[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)), keys_R[:, :whole])
    if n % BLOCK:
        _fill(out_R[:, None, whole * BLOCK :], keys_R[:, whole : whole + 1])
    return out_R


@functools.cache
def lane_words() -> np.ndarray:
    """Return one hashed word per lane of a block, uint32 [BLOCK]."""
    return hashed(np.arange(BLOCK, dtype=np.uint64)).astype(np.uint32)


def _fill(lanes: Tensor, keys: Tensor) -> None:
    torch.bitwise_xor(lanes_on(lanes.device)[: lanes.shape[2]], keys[..., :1], out=lanes).mul_(keys[..., 1:])


@functools.cache
def lanes_on(device: torch.device) -> Tensor:
    """Return `lane_words` on a device, as int32; cached."""
    return table(torch.from_numpy(lane_words().view(np.int32)), device)
