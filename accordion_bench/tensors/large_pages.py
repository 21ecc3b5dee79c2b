"""Memory for gradient-sized results on a CPU, where page faults of fresh memory cost as much as a pass over it.

NumPy requests large pages from the system, torch does not. `empty` reuses memory that is no longer referenced, because
consecutive steps request the same sizes.
"""

import threading
import weakref
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SMALL = 1 << 20  # bytes; the C library reuses smaller memory itself
RECENT = 1000  # number of requests after which unused memory is released


class Memory(NamedTuple):
    """Memory, a weak reference to its holder (dead = free), and the number of requests when it was assigned."""

    memory: np.ndarray
    holder: weakref.ref
    handed_out: int


_lock = threading.Lock()
_pieces: list[Memory] = []
_requests = 0


def empty(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised tensor [n]."""
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


def zeros(rows: int, n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros [rows, n], for sparse writes or one addition."""
    if device.type == "cpu":  # the system provides zeroed memory without a pass over it
        flat = torch.from_numpy(np.zeros(max(rows * n, 1) * dtype.itemsize, np.uint8)).view(dtype)
        return flat[: rows * n].view(rows, n)
    return torch.zeros(rows, n, dtype=dtype, device=device)
