"""Counter-based random bits: value i of a stream depends on the key and i only.

Chunks of a tensor get the same numbers for any partition and on any device; there is no state. Counters are partitioned
into blocks. A table contains a hashed word for each lane of a block. splitmix64 (Steele, Lea, Flood 2014) computes a
word and an odd factor from (key, block), and value = (word of the lane xor word of the block) x factor modulo 2^32, two
vector operations. As in any product, only the leading bits are random. Two blocks form pairs (a z, b z) with random
factors a and b, a lattice that is too fine to be observed unless a and b are tiny.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.upload import table, upload

BLOCK = 4096

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def blocks_of(keys_R: Sequence[Sequence[int]], counts: Sequence[int], device: torch.device) -> Tensor:
    """Return the keys of blocks for `fill_bits_`: an int32 word and odd factor, [R, sum of counts, 2].

    Blocks of a row are ordered by stream.

    Args:
        keys_R: one key per stream, for each row.
        counts: number of blocks of each stream.
        device: device of the result.
    """
    streams = np.repeat(np.stack([streams_of(keys) for keys in keys_R]), counts, axis=1)
    numbers = np.concatenate([np.arange(count, dtype=np.uint64) for count in counts])
    return upload(_keys_of_blocks(streams, numbers), device)


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


def _keys_of_blocks(streams: np.ndarray, numbers: np.ndarray) -> Tensor:
    z = streams + numbers
    words = hashed(z).view(np.uint32).reshape(*z.shape, 2)
    words[..., 1] = words[..., 1] & ~np.uint32(7) | np.uint32(5)
    return torch.from_numpy(words.view(np.int32))


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
    torch.bitwise_xor(_words_on(lanes.device)[: lanes.shape[2]], keys[..., :1], out=lanes).mul_(keys[..., 1:])


@functools.cache
def _words_on(device: torch.device) -> Tensor:
    return table(torch.from_numpy(lane_words().view(np.int32)), device)
