"""Selection of entries to send: exactly the k largest, or about k by a threshold from a sample.

Tensor suffixes: R rows, N elements.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from accordion_bench.tensors.upload import upload

POSITIONS = (1 << 32) - 1
EXPECTED = 32  # expected entries of a sample above the threshold; the relative error of the count is 1/sqrt(32)


class Selection(Protocol):
    """Selected coordinates of a bucket, in a format private to the engine."""

    @property
    def counts_W(self) -> Tensor:
        """Number of selected coordinates of each tensor, int32 [W, T], on the device of the tensors."""


@dataclass(frozen=True)
class IndexSelection:
    """Selection stored as ascending indices, one tensor [k] per tensor and worker, [T][W]."""

    indices: list[list[Tensor]]

    @functools.cached_property
    def counts_W(self) -> Tensor:
        """See `Selection`."""
        counts = [list(map(len, own_T)) for own_T in zip(*self.indices, strict=True)]
        return upload(torch.tensor(counts, dtype=torch.int32), self.indices[0][0].device)


class Sampling(NamedTuple):
    """Parameters of a threshold that is estimated from a sample, see `sampled_top`.

    share: fraction of the coordinates in the sample.
    least, most: smallest and largest count accepted, as multiples of the wanted count.
    offset: first coordinate of the sample.
    """

    share: float
    least: float
    most: float
    offset: int


@functools.lru_cache(4096)
def kept_entries(numel: int, density: float, at_least: int = 1) -> int:
    """Return k = max(at_least, floor(density numel)), at most numel."""
    # 1e-9: a density such as 0.29 times 100 is 28.999999999999996 in floating point
    return min(numel, max(at_least, int(density * numel + 1e-9)))


def kept_at_least(n: int, density: float) -> int:
    """Return k = ceil(density n), at least 1 and at most n."""
    # 1e-9: a density such as 0.07 times 100 is 7.000000000000001 in floating point
    return min(n, max(1, math.ceil(density * n - 1e-9)))


def top_indices(rows_R: Tensor, k: int) -> Tensor:
    """Return ascending indices [R, k] of the k largest magnitudes of each row [R, N]; see `Engine.largest`."""
    if k in (0, rows_R.shape[1]):
        return torch.arange(k, device=rows_R.device).expand(rows_R.shape[0], k).contiguous()
    if rows_R.device.type != "cpu" and rows_R.dtype == torch.float32:  # slower, but does not synchronise
        return top_positions(rows_R, rows_R.shape[1], k)
    return torch.stack([_top_of_row(row, k) for row in rows_R])


def top_positions(x_R: Tensor, size: int, k: int) -> Tensor:
    """Return ascending positions [R, K] of the k largest magnitudes of each section of `size` entries of rows [R, N].

    Magnitudes are ordered by the bits of |x| as float32, NaN above infinity; ties go to the lower position. The host
    does not synchronise.
    """
    positions = torch.arange(x_R.shape[1], device=x_R.device)
    keys_R = (x_R.float().abs().view(torch.int32).long() << 32).add_(POSITIONS - positions)  # no two are equal
    found_R = keys_R.unflatten(1, (-1, size)).topk(k, dim=2, sorted=False).values.flatten(1)
    return (~found_R & POSITIONS).sort(dim=1).values


def _top_of_row(row: Tensor, k: int) -> Tensor:
    magnitudes = row.abs().nan_to_num_(nan=math.inf, posinf=math.inf)
    smallest = kth_largest(magnitudes, k)
    chosen = (magnitudes >= smallest).nonzero()[:, 0]
    if len(chosen) > k:
        above, tied = (magnitudes > smallest).nonzero()[:, 0], (magnitudes == smallest).nonzero()[:, 0]
        chosen = torch.cat([above, tied[: k - len(above)]]).sort().values
    return chosen


def kth_largest(magnitudes: Tensor, k: int) -> float:
    """Return the k-th largest of magnitudes [N], 0 < k <= N; NaN counts as the largest."""
    return float(magnitudes.topk(k, sorted=False).values.min())


def at_least(row: Tensor, threshold: float) -> Tensor:
    """Return ascending indices of entries of a row [N] whose magnitude is at least a threshold, or NaN."""
    return (~(row.abs() < threshold)).nonzero()[:, 0]


def strided_sample(row: Tensor, size: int, offset: int = 0) -> Tensor:
    """Return at least `size` evenly spaced magnitudes of a row [N]; the first index is `offset` modulo the stride."""
    stride = stride_of(len(row), size)
    return row[offset % stride :: stride].abs()


def stride_of(n: int, size: int) -> int:
    """Return the stride of a sample of at least `size` of n entries."""
    stride = max(1, n // max(size, 1))
    while math.gcd(stride, n) > 1:  # otherwise the sample contains only some rows or filter taps of a tensor
        stride -= 1
    return stride


def sampled_top(row: Tensor, k: int, share: float, least: float, most: float, offset: int = 0) -> Tensor:
    """Return ascending indices of about the k largest magnitudes of a row [N], without zeros.

    The result is all entries of at least a threshold, the one above which a strided sample has its share of k entries.
    The threshold is lowered until at least `least` k entries, or all non-zero ones, reach it. If more than `most` k
    entries reach it, exactly the k largest are kept. If `share` exceeds 0.5, or k is below 64, the result is exactly
    the k largest.

    Args:
        row: coordinates.
        k: number of entries wanted, at most N.
        share, least, most, offset: see `Sampling`; the sample is larger if fewer than 32 of it would be kept, and the
            index of its first entry is `offset` modulo the stride.

    Source: Lin et al. 2018 (arXiv 1712.01887), section 5 and its hierarchical selection.
    """
    n = len(row)
    if share > 0.5 or k < 2 * EXPECTED:
        found = top_indices(row[None], k)[0]
        return found[row[found] != 0]
    sample = strided_sample(row, math.ceil(max(share * n, EXPECTED * n / k)), offset)
    smallest_sent = torch.finfo(row.dtype).tiny
    rank = max(1, round(k * len(sample) / n))
    while True:
        threshold = max(kth_largest(sample, rank), smallest_sent)
        found = at_least(row, threshold)
        if len(found) >= least * k or threshold == smallest_sent:
            break
        if rank == len(sample):  # the sample contains none of the large entries
            return top_indices(row[None], k)[0]
        rank = min(len(sample), max(rank + 1, math.ceil(rank * k / len(found))))
    if len(found) > most * k:
        found = found[top_indices(row[found][None], k)[0]]
    return found
