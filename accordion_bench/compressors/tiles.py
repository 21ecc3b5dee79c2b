"""Tiles: a long row in parts that stay in a processor's cache between the passes over them."""

from collections.abc import Iterator

import torch

from accordion_bench.random_bits import BLOCK

TILE = 10 * BLOCK  # coordinates: whole blocks of random bits, whole bytes of any code


def tiles(n: int, device: torch.device, unit: int = 1) -> Iterator[slice]:
    """Cut n coordinates into tiles of whole `unit`s; on an accelerator into one.

    Args:
        n: coordinates.
        device: where they are.
        unit: coordinates that must stay together, e.g. a bucket; 1 keeps `TILE`s.
    """
    size = max(n, 1) if device.type != "cpu" else TILE if unit == 1 else max(1, TILE // unit) * unit
    for start in range(0, n, size):
        yield slice(start, min(start + size, n))
