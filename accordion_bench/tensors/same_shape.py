"""Memory of tensors: one allocation for several, their views, and reuse of large memory on a CPU.

Tensors of equal shape form one block [W, G, ...], so that batched operations over workers and tensors need no copy.
"""

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from accordion_bench.plan import TensorSpec

ALIGNMENT = 128  # bytes
RUN = 1 << 16  # elements of a flat tensor per pass
SMALL = 1 << 20  # bytes; the C library reuses smaller memory itself
RECENT = 1000  # number of requests after which unused memory is released


class Blocks:
    """Zeroed tensors [W, ...] for every spec in one allocation, grouped by shape.

    Args:
        specs: names and shapes.
        workers: number of rows, W.
        like: tensor with the dtype and the device.

    Attributes:
        tensors: one view [W, ...] per spec, in the order of `specs`.
        blocks: one view [W, G, ...] per shape, at a multiple of 128 bytes of the allocation.
        flat: the allocation, one-dimensional; gaps contain zeros.
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
    """Replace lists of tensors by their flat allocations, for element-wise operations.

    Args:
        lists: lists of tensors of equal shapes in the same order; or of disjoint parts of tensors.

    Returns:
        one list per list: [flat tensor] if every list contains all tensors of `Blocks` of the same layout, otherwise
        its tensors.
    """
    flat = [x for x in map(_flat_of, lists) if x is not None]
    alike = len(flat) == len(lists) and all(x.shape == flat[0].shape for x in flat)
    offsets = [[x.storage_offset() for x in xs] for xs in lists] if alike else []
    if alike and all(own == offsets[0] for own in offsets):
        return [[x] for x in flat]
    return [list(xs) for xs in lists]


def runs(*lists: Sequence[Tensor], whole: bool) -> list[list[list[Tensor]]]:
    """Split lists of tensors for several element-wise passes, so that each part stays in the cache of a CPU.

    Args:
        lists: see `one_allocation`.
        whole: whether to return one part with all tensors, as for a GPU, where each pass is one launch.

    Returns:
        for each part, one list of tensors per list.
    """
    found = one_allocation(*lists)
    if whole:
        return [found]
    if found[0] and found[0][0].ndim == 1:
        found = [[part for x in xs for part in x.split(RUN)] for xs in found]
    return [[[x] for x in turn] for turn in zip(*found, strict=True)]


def _flat_of(xs: Sequence[Tensor]) -> Tensor | None:
    """Return the allocation of `Blocks` that these tensors cover completely; None if there is none."""
    base = xs[0]._base if xs else None
    if base is None or any(x._base is not base for x in xs):
        return None
    if getattr(base, "numbers_of_blocks", -1) != sum(x.numel() for x in xs):
        return None
    return base if len({x.data_ptr() for x in xs if x.numel()}) == sum(x.numel() > 0 for x in xs) else None


def joined(xs: Sequence[Tensor]) -> Tensor:
    """Concatenate contiguous tensors of one dtype as a vector; a view if they are adjacent in memory."""
    first, flat = xs[0], sum(x.numel() for x in xs)
    ends = itertools.accumulate((x.numel() for x in xs), initial=first.storage_offset())
    memory = first.untyped_storage().data_ptr()
    together = all(
        x.is_contiguous() and x.storage_offset() == end and x.untyped_storage().data_ptr() == memory
        for x, end in zip(xs, ends, strict=False)
    )
    return first.as_strided((flat,), (1,)) if together else torch.cat([x.reshape(-1) for x in xs])


def in_rows(x_W: Tensor) -> Tensor:
    """Return a tensor [W, ...] as rows [W, N]; N is 1 for a tensor [W]."""
    return x_W.flatten(1) if x_W.ndim > 1 else x_W[:, None]


def as_matrices(xs_W: Sequence[Tensor], matrix: tuple[int, int]) -> Tensor | None:
    """View tensors [W, ...] of equal shape as one batch of matrices [W*G, n, m]; None if they are not adjacent."""
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


# ---- reuse of large memory


class Memory(NamedTuple):
    """Memory, a weak reference to its holder (dead = free), and the number of requests when it was assigned."""

    memory: np.ndarray
    holder: weakref.ref
    handed_out: int


_lock = threading.Lock()
_pieces: list[Memory] = []
_requests = 0


def empty_vector(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor [n]; on a CPU in memory that is no longer referenced, if there is some.

    Page faults of fresh memory cost as much as a pass over a tensor of the size of a gradient, and consecutive
    steps request the same sizes. NumPy requests large pages from the system, torch does not.
    """
    nbytes = n * dtype.itemsize
    if device.type != "cpu" or nbytes < SMALL:
        return torch.empty(n, dtype=dtype, device=device)
    return torch.from_numpy(_handed_out(nbytes)).view(dtype)


def _handed_out(nbytes: int) -> np.ndarray:
    """Return bytes that are not in use; they are in use as long as the returned array exists."""
    global _requests
    with _lock:
        _requests += 1
        free = [piece for piece in _pieces if piece.holder() is None]
        again = next((piece for piece in free if piece.memory.nbytes == nbytes), None)
        given_back = [piece for piece in free if piece is again or piece.handed_out < _requests - RECENT]
        _pieces[:] = [piece for piece in _pieces if not any(piece is other for other in given_back)]
        memory = np.empty(nbytes, np.uint8) if again is None else again.memory
        held = memory[:]
        _pieces.append(Memory(memory, weakref.ref(held), _requests))
        return held


def zero_rows(rows: int, n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros [rows, n], for sparse writes or one addition."""
    if device.type == "cpu":  # the system provides zeroed memory without a pass over it
        flat = torch.from_numpy(np.zeros(max(rows * n, 1) * dtype.itemsize, np.uint8)).view(dtype)
        return flat[: rows * n].view(rows, n)
    return torch.zeros(rows, n, dtype=dtype, device=device)


def is_sharded(x: Tensor) -> bool:
    """Return whether x is a DTensor, as with FSDP2; without the import of the class, which takes a second."""
    return hasattr(x, "device_mesh")


def as_real(x: Tensor) -> Tensor:
    """Return the view of a tensor for exchange; x itself if it is neither complex nor sharded."""
    if is_sharded(x):
        x = x.detach().to_local()  # type: ignore[attr-defined]
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def as_kind_of(x: Tensor, like: Tensor) -> Tensor:
    """Return the tensor of the kind of `like` for a result of `as_real`; a view if the two parts are adjacent."""
    if like.is_complex():
        x = torch.view_as_complex(x if x.stride(-1) == 1 else x.contiguous())
    if not is_sharded(like):
        return x
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return DTensor.from_local(x, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
