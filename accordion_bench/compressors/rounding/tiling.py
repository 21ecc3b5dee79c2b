"""Rows in tiles, tiles in buckets: where a pass begins and ends, and the scratch memory that it writes to."""

import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor


def bucket_count(n: int, bucket_size: int | None) -> int:
    """m, the number of buckets of n coordinates."""
    return -(-n // (bucket_size or max(n, 1)))


def tiles(rows: int, n: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Cut [rows, n] into tiles of `size` coordinates: several whole rows, or a part of one row."""
    at_once = max(1, size // max(n, 1))
    for row in range(0, rows if n else 0, at_once):
        for column in range(0, n, size):
            yield slice(row, min(row + at_once, rows)), slice(column, min(column + size, n))


class Buffers:
    """Scratch memory for the largest tile of [rows, n], one tensor per type, cut to the shape of each tile.

    Args:
        rows, n: shape of what is cut into tiles.
        size: coordinates of a tile.
        device: where the memory is.
        dtypes: one per tensor.
    """

    def __init__(self, rows: int, n: int, size: int, device: torch.device, *dtypes: torch.dtype) -> None:
        room = min(rows * max(n, 1), size)
        self.flat = [torch.empty(room, dtype=dtype, device=device) for dtype in dtypes]
        self.cut: dict[torch.Size, list[Tensor]] = {}

    def __call__(self, shape: torch.Size) -> list[Tensor]:
        """The tensors in the shape of a tile; their contents are whatever was written last."""
        if shape not in self.cut:
            self.cut[shape] = [flat[: shape.numel()].view(shape) for flat in self.flat]
        return self.cut[shape]


@functools.lru_cache(maxsize=4096)
def pieces(start: int, stop: int, bucket_size: int) -> list[tuple[slice, slice, int]]:
    """Cut columns at bucket borders: (columns counted from `start`, their buckets, columns per bucket).

    A piece has one bucket or a part of one, or several whole buckets.
    """
    first, last = -(-start // bucket_size) * bucket_size, stop // bucket_size * bucket_size
    borders = sorted({start, min(first, stop), max(last, start), stop})
    found = []
    for left, right in itertools.pairwise(borders):
        count = max(1, (right - left) // bucket_size)
        bucket = left // bucket_size
        found.append((slice(left - start, right - start), slice(bucket, bucket + count), (right - left) // count))
    return found


def bucket_views(tile: Tensor, per_bucket_R: Tensor, row: slice, start: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Tile [rows, columns] and one number per bucket in pairs [rows, buckets, columns], [rows, buckets, 1]."""
    return [
        (tile[:, columns].view(len(tile), -1, width), per_bucket_R[row, buckets, None])
        for columns, buckets, width in pieces(start, start + tile.shape[1], size)
    ]


def multiply_buckets(x: Tensor, factors_R: Tensor, row: slice, start: int, size: int, out: Tensor) -> Tensor:
    """out = x [rows, columns] times the factor of each bucket; the columns begin with `start`."""
    for columns, buckets, width in pieces(start, start + x.shape[1], size):
        parts = (whole[:, columns].view(len(x), -1, width) for whole in (x, out))
        torch.mul(next(parts), factors_R[row, buckets, None], out=next(parts))
    return out


def add_products_(sums: Tensor, values: Tensor, norms_A: Tensor, start: int, size: int, signs: bool) -> None:
    """sums += values [senders, columns] times the norm of their bucket, rounded after the product and after the sum.

    Args:
        sums, values: [senders, columns]; the columns begin with `start`. The values are overwritten.
        norms_A: per sender and bucket of the whole row, float32 [senders, m].
        start: of the columns.
        size: columns of a bucket.
        signs: the values are 1 and -1.
    """
    for columns, buckets, width in pieces(start, start + values.shape[1], size):
        part, out = (whole[:, columns].view(len(values), -1, width) for whole in (values, sums))
        norms = norms_A[:, buckets, None]
        if signs and out.dtype == norms.dtype:  # their products are exact: one pass gives the same
            out.addcmul_(part, norms)
        else:
            out.add_(part.mul_(norms))
