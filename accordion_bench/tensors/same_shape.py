"""Blocks: storage for one tensor [W, ...] per spec in which tensors of equal shape lie side by side.

Equal shapes form one block [W, G, ...], so that a batched operation over workers and tensors needs no copy.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench.plan import TensorSpec

ALIGNMENT = 128  # bytes
RUN = 1 << 16  # numbers of a flat tensor at a time


class Blocks:
    """Zeroed tensors [W, ...] for every spec in one allocation, those of equal shape in one block of it.

    Args:
        specs: names and shapes.
        workers: rows, W.
        like: gives type and device.

    Attributes:
        tensors: one view [W, ...] per spec, in the order of `specs`.
        blocks: [W, G, ...] per shape; each begins at a multiple of 128 bytes.
        flat: the allocation, one-dimensional; gaps hold zeros.
    """

    def __init__(self, specs: Sequence[TensorSpec], workers: int, like: Tensor) -> None:
        members: dict[tuple[int, ...], list[int]] = {}
        for i, spec in enumerate(specs):
            members.setdefault(spec.shape, []).append(i)
        step = ALIGNMENT // like.dtype.itemsize
        sizes = [workers * len(indices) * specs[indices[0]].numel for indices in members.values()]
        *starts, total = itertools.accumulate((-(-size // step) * step for size in sizes), initial=0)
        self.flat = torch.zeros(total, dtype=like.dtype, device=like.device)
        self.flat.numbers_of_blocks = sum(sizes)  # type: ignore[attr-defined]
        self.tensors: list[Tensor] = [like] * len(specs)
        self.blocks: list[Tensor] = []
        for (shape, indices), start, size in zip(members.items(), starts, sizes, strict=True):
            block = self.flat[start : start + size].view(workers, len(indices), *shape)
            self.blocks.append(block)
            for g, i in enumerate(indices):
                self.tensors[i] = block[:, g]


def one_allocation(*lists: Sequence[Tensor]) -> list[list[Tensor]]:
    """Lists of tensors for work on each of their numbers: one flat tensor in the place of all tensors of `Blocks`.

    Args:
        lists: tensors of equal shapes, in one order; or parts of tensors, no number in two of them.

    Returns:
        of each list a list; lists of flat tensors only where all of them are that.
    """
    flat = [x for x in map(_flat_of, lists) if x is not None]
    alike = len(flat) == len(lists) and all(x.shape == flat[0].shape for x in flat)
    offsets = [[x.storage_offset() for x in xs] for xs in lists] if alike else []
    if alike and all(own == offsets[0] for own in offsets):
        return [[x] for x in flat]
    return [list(xs) for xs in lists]


def runs(*lists: Sequence[Tensor], whole: bool) -> list[list[list[Tensor]]]:
    """The same for work of several passes: all at once (`whole`), or as much at a time as a CPU's cache holds.

    Args:
        lists: see `one_allocation`.
        whole: a device takes all tensors in one launch.

    Returns:
        for each turn a list of each of the lists.
    """
    found = one_allocation(*lists)
    if whole:
        return [found]
    if found[0] and found[0][0].ndim == 1:
        found = [[part for x in xs for part in x.split(RUN)] for xs in found]
    return [[[x] for x in turn] for turn in zip(*found, strict=True)]


def _flat_of(xs: Sequence[Tensor]) -> Tensor | None:
    """The allocation of `Blocks` of which these have all numbers; None = there is none."""
    base = xs[0]._base if xs else None
    if base is None or any(x._base is not base for x in xs):
        return None
    if getattr(base, "numbers_of_blocks", -1) != sum(x.numel() for x in xs):
        return None
    return base if len({x.data_ptr() for x in xs if x.numel()}) == sum(x.numel() > 0 for x in xs) else None


def joined(xs: Sequence[Tensor]) -> Tensor:
    """Contiguous tensors of one type, one behind the other, as one vector; no copy where they lie so."""
    first, flat = xs[0], sum(x.numel() for x in xs)
    ends = itertools.accumulate((x.numel() for x in xs), initial=first.storage_offset())
    memory = first.untyped_storage().data_ptr()
    together = all(
        x.is_contiguous() and x.storage_offset() == end and x.untyped_storage().data_ptr() == memory
        for x, end in zip(xs, ends, strict=False)
    )
    return first.as_strided((flat,), (1,)) if together else torch.cat([x.reshape(-1) for x in xs])


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
