"""Fresh memory for gradient-sized results, which a CPU touches for the first time faster in large pages."""

import numpy as np
import torch
from torch import Tensor


def empty(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised [n]."""
    if device.type == "cpu":  # NumPy asks the system for large pages, torch does not
        return torch.from_numpy(np.empty(max(n, 1) * dtype.itemsize, np.uint8)).view(dtype)[:n]
    return torch.empty(n, dtype=dtype, device=device)


def zeros(rows: int, n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Zeros [rows, n], to be written in few places or added to once."""
    if device.type == "cpu":  # memory comes zeroed from the system: no pass over all of it
        flat = torch.from_numpy(np.zeros(max(rows * n, 1) * dtype.itemsize, np.uint8)).view(dtype)
        return flat[: rows * n].view(rows, n)
    return torch.zeros(rows, n, dtype=dtype, device=device)
