"""Blocks of coordinates for the kernels of an exact selection.

A block is the part of a tensor that one program processes. Keys are the bits of |x| as float32, whose order is that of
magnitudes, with NaN above infinity.

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

BLOCK = 1 << 14  # most coordinates of a block
SAMPLE = 1 << 14  # fewest coordinates of the sample for bounds, if the tensor has as many
SECTOR = tl.constexpr(8)  # contiguous coordinates of a sample: 32 bytes, the unit of reads on a GPU
SPARSEST = 64  # inverse of the smallest fraction of coordinates in a sample, approximately
DEVIATIONS = 5  # standard deviations of a rank in a sample between its bounds and its expectation

COLUMNS = tl.constexpr(9)
N, WANTED, FIRST, BLOCKS, FIRST_BLOCK, SAMPLED, STEP, RANK = (tl.constexpr(column) for column in range(8))
"""Columns of a tensor: coordinates; entries wanted; entries of previous tensors; blocks; blocks of previous tensors;
coordinates of the sample with a full last sector; stride of the sectors in the sample; ranks in the sample of a lower
and of an upper bound of the key."""


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
    """Return ranks in a sample of `seen` of n entries, whose keys are expected to enclose the k-th largest of all."""
    if seen >= n:
        return k, k
    expected = k * seen / n
    margin = DEVIATIONS * math.sqrt(expected * (1 - k / n)) + DEVIATIONS
    return math.ceil(expected + margin), max(0, math.floor(expected - margin))


@functools.lru_cache(maxsize=KEPT)
def parts_on(counts: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """Return `parts_of` on a device; cached."""
    return upload.table(torch.from_numpy(parts_of(np.array(counts, np.int64), size)), device)


def parts_of(counts: np.ndarray, size: int) -> np.ndarray:
    """Return a table of `counts` parts of each tensor, int64 [P, 2]: the tensor, and the first entry of the part."""
    of = np.repeat(np.arange(len(counts)), counts)
    begin = (np.arange(len(of)) - (counts.cumsum() - counts)[of]) * size
    return np.stack([of, begin], axis=1)


@triton.jit
def key_of(number):  # type: ignore[no-untyped-def]
    """Bits of |x| as float32, int32."""
    return number.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
