"""Blocks of coordinates for an exact selection: what the host tells its kernels.

A block is a part of a tensor, one program's work. Keys are the bits of |x| as a float32, whose order is that of
magnitudes; NaN is above infinity.

Tensor suffixes: T tensors.
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
from accordion_bench.tensors.kernels.on_gpu.table import KEPT

BLOCK = 1 << 14  # coordinates of a block, at most
SAMPLE = 1 << 14  # least coordinates of a tensor that are looked at for bounds, where it has as many
SECTOR = tl.constexpr(8)  # coordinates side by side in a sample: GPUs read 32 bytes at once
SPARSEST = 64  # at least about one of so many coordinates is in the sample
DEVIATIONS = 5  # of a rank in a sample, on either side of what is expected

COLUMNS = tl.constexpr(9)
N, WANTED, FIRST, BLOCKS, FIRST_BLOCK, SAMPLED, STEP, RANK = (tl.constexpr(column) for column in range(8))
"""Columns of a tensor: coordinates; entries wanted; entries of the tensors before; blocks; blocks before; coordinates
of its sample, if its last sector were full; of its sectors every how many-th is in the sample; ranks in the sample, of
a key that is too low and one that is too high."""


class BlockTable(NamedTuple):
    """Tensors in blocks, on a GPU.

    tensors: int64 [T, COLUMNS].
    blocks: int64 [B, 2]: the tensor, and the block's first coordinate.
    samples: int64 [P, 2]: the tensor, and the first entry of its sample.
    wanted: entries of all tensors.
    """

    tensors: Tensor
    blocks: Tensor
    samples: Tensor
    wanted: int


@functools.lru_cache(maxsize=KEPT)
def blocks_on(numels: tuple[int, ...], wanted: tuple[int, ...], device: torch.device) -> BlockTable:
    """Blocks of tensors of which some entries are wanted, at most all; of which none is wanted, there are no blocks."""
    n, k = np.array(numels, np.int64), np.array(wanted, np.int64)
    step = np.clip(n // SAMPLE, 1, SPARSEST) | 1  # odd, so that few patterns of a tensor meet it
    sectors = -(-n // (step * SECTOR.value))
    seen = (sectors - 1) * SECTOR.value + np.minimum(SECTOR.value, n - (sectors - 1) * step * SECTOR.value)
    counts = np.where(k > 0, -(-n // BLOCK), 0)
    ranks = np.array([_ranks(*one) for one in zip(n.tolist(), k.tolist(), seen.tolist(), strict=True)], np.int64)
    sampled = sectors * SECTOR.value
    columns = [n, k, k.cumsum() - k, counts, counts.cumsum() - counts, sampled, step, *ranks.T]
    return BlockTable(
        upload.table(torch.from_numpy(np.stack(columns, axis=1)), device),
        parts_on(tuple(counts.tolist()), BLOCK, device),
        parts_on(tuple(np.where(k > 0, -(-sampled // BLOCK), 0).tolist()), BLOCK, device),
        int(k.sum()),
    )


def _ranks(n: int, k: int, seen: int) -> tuple[int, int]:
    """Ranks in a sample of so many of n entries, between whose keys the k-th largest of all is expected."""
    if seen >= n:
        return k, k
    expected = k * seen / n
    margin = DEVIATIONS * math.sqrt(expected * (1 - k / n)) + DEVIATIONS
    return math.ceil(expected + margin), max(0, math.floor(expected - margin))


@functools.lru_cache(maxsize=KEPT)
def parts_on(counts: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """See `parts_of`; on a device, remembered."""
    return upload.table(torch.from_numpy(parts_of(np.array(counts, np.int64), size)), device)


def parts_of(counts: np.ndarray, size: int) -> np.ndarray:
    """So many parts of each tensor, int64 [P, 2]: the tensor, and the part's first entry."""
    of = np.repeat(np.arange(len(counts)), counts)
    begin = (np.arange(len(of)) - (counts.cumsum() - counts)[of]) * size
    return np.stack([of, begin], axis=1)


@triton.jit
def key_of(number):  # type: ignore[no-untyped-def]
    """The bits of |x|, int32."""
    return number.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
