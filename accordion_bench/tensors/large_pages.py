"""Memory for gradient-sized results on a CPU, which touches it for the first time at the price of a whole pass.

NumPy asks the system for large pages, torch does not. What `empty` has handed out is used again once it is no longer
held: a step asks for the same sizes as the one before.
"""

import threading
import weakref
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SMALL = 1 << 20  # bytes; less than that the C library keeps itself
RECENT = 1000  # requests, after which unused memory is given back


class Memory(NamedTuple):
    """Memory, who holds it (a dead reference: it is free), and when it was handed out: a number of requests."""

    memory: np.ndarray
    holder: weakref.ref
    handed_out: int


_lock = threading.Lock()
_pieces: list[Memory] = []
_requests = 0


def empty(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised [n]."""
    nbytes = n * dtype.itemsize
    if device.type != "cpu" or nbytes < SMALL:
        return torch.empty(n, dtype=dtype, device=device)
    return torch.from_numpy(_handed_out(nbytes)).view(dtype)


def _handed_out(nbytes: int) -> np.ndarray:
    """Bytes that are not held elsewhere; they are held for as long as this array is."""
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
    """Zeros [rows, n], to be written in few places or added to once."""
    if device.type == "cpu":  # memory comes zeroed from the system: no pass over all of it
        flat = torch.from_numpy(np.zeros(max(rows * n, 1) * dtype.itemsize, np.uint8)).view(dtype)
        return flat[: rows * n].view(rows, n)
    return torch.zeros(rows, n, dtype=dtype, device=device)
