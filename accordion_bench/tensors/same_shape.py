"""Blocks: storage for one tensor [W, ...] per spec in which tensors of equal shape lie side by side.

Equal shapes form one block [W, G, ...], so that a batched operation over workers and tensors needs no copy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.plan import TensorSpec


class Blocks:
    """Zeroed tensors [W, ...] for every spec, as views into one block per shape.

    Args:
        specs: names and shapes.
        workers: rows, W.
        like: gives type and device.

    Attributes:
        tensors: one view [W, ...] per spec, in the order of `specs`.
        blocks: the storage, [W, G, ...] per shape.
    """

    def __init__(self, specs: Sequence[TensorSpec], workers: int, like: Tensor) -> None:
        members: dict[tuple[int, ...], list[int]] = {}
        for i, spec in enumerate(specs):
            members.setdefault(spec.shape, []).append(i)
        self.tensors: list[Tensor] = [like] * len(specs)
        self.blocks: list[Tensor] = []
        for shape, indices in members.items():
            block = torch.zeros(workers, len(indices), *shape, dtype=like.dtype, device=like.device)
            self.blocks.append(block)
            for g, i in enumerate(indices):
                self.tensors[i] = block[:, g]


def in_rows(x_W: Tensor) -> Tensor:
    """A tensor [W, ...] as rows [W, N]; N is 1 where a worker has a single number, without a dimension."""
    return x_W.flatten(1) if x_W.ndim > 1 else x_W[:, None]


def as_matrices(xs_W: Sequence[Tensor], matrix: tuple[int, int]) -> Tensor | None:
    """Equal-shaped tensors [W, ...] as one batch of matrices [W*G, n, m] without a copy; None where they are apart."""
    first, (n, m) = xs_W[0], matrix
    workers, count, size = first.shape[0], len(xs_W), n * m
    if count == 1:
        return first.reshape(workers, n, m)
    side_by_side = all(
        x[0].is_contiguous()
        and x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and x.storage_offset() == first.storage_offset() + g * size
        and (workers == 1 or x.stride(0) == count * size)
        for g, x in enumerate(xs_W)
    )
    if not side_by_side:
        return None
    return first.as_strided((workers * count, n, m), (size, m, 1))
