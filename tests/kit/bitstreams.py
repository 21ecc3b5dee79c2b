"""References for entropy-coded streams: the entropy, and the decoder."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.compressors.dense import _constriction, _model


def shannon_bits(counts: Tensor) -> float:
    """Return the entropy of the whole stream in bits: - sum of count x log2(count / total)."""
    counts = counts.double()
    shares = counts / counts.sum().clamp_min(torch.finfo(torch.float64).tiny)
    return max(0.0, -torch.special.xlogy(counts, shares).sum().item() / math.log(2))


def ans_decode(stream: bytes, counts: Any, n: int) -> np.ndarray:
    """Invert `entropy.ans_encode` with the same table; return the n symbols, uint8."""
    coder = _constriction().stream.stack.AnsCoder(np.frombuffer(stream, dtype="<u4").astype(np.uint32))
    return coder.decode(_model(counts), n).astype(np.uint8)
