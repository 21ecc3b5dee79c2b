"""Tiles: a long row in parts that stay in a processor's cache between the passes over them."""

from collections.abc import Iterator

import torch

from accordion_bench.tensors.counter_rng import BLOCK

TILE = 80 * BLOCK  # coordinates: whole blocks of random bits, whole bytes of any code; smaller ones cost in calls


def tiles(n: int, device: torch.device, unit: int = 1) -> Iterator[slice]:
    """Cut n coordinates into tiles of whole `unit`s; on an accelerator into one.

    Args:
        n: coordinates.
        device: where they are.
        unit: coordinates that must stay together, e.g. a bucket; 1 keeps `TILE`s.
    """
    if device.type != "cpu":
        size = max(n, 1)
    elif unit == 1:
        size = TILE
    else:
        size = max(1, TILE // unit) * unit
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))


def bucket_tiles(n: int, size: int, device: torch.device) -> Iterator[tuple[slice, tuple[int, int], slice]]:
    """Cut n coordinates in buckets of `size` into tiles: several whole buckets, or a part of one.

    Yields:
        the coordinates, their shape as [buckets, columns], and which buckets these are.
    """
    whole = n // size * size
    if size <= TILE or device.type != "cpu":
        for part in tiles(whole, device, size):
            yield part, (-1, size), slice(part.start // size, part.stop // size)
    else:
        for start in range(0, whole, size):
            for part in tiles(size, device):
                bucket = start // size
                yield slice(start + part.start, start + part.stop), (1, -1), slice(bucket, bucket + 1)
    if whole < n:
        for part in tiles(n - whole, device):
            yield slice(whole + part.start, whole + part.stop), (1, -1), slice(whole // size, whole // size + 1)
