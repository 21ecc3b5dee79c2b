"""Entropy coding of symbol streams: exact code lengths from histograms, and a real bitstream to verify them.

Source: Huffman 1952; Elias 1975; asymmetric numeral systems: Duda 2013 (arXiv 1311.2540).
"""

import heapq
import importlib.util
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.options import checks


def huffman_lengths(counts: Tensor) -> Tensor:
    """Return the bits per symbol [K] of an optimal prefix code, which the lengths determine (canonical Huffman).

    Args:
        counts: [K], frequency or probability of each symbol; above 0 if the code book must contain the symbol.

    Returns int64 [K]: 0 for a symbol that does not occur, 1 for the only symbol.
    """
    lengths = [0] * counts.numel()
    # The second entry breaks ties by age, which gives shallow trees and the same lengths on every rank.
    heap: list[tuple[Any, int, list[int]]] = [(n, i, [i]) for i, n in enumerate(counts.tolist()) if n > 0]
    if len(heap) == 1:
        lengths[heap[0][1]] = 1
    heapq.heapify(heap)
    for age in range(len(lengths), len(lengths) + len(heap) - 1):
        (n, _, some), (m, _, others) = heapq.heappop(heap), heapq.heappop(heap)
        for symbol in some + others:
            lengths[symbol] += 1
        heapq.heappush(heap, (n + m, age, some + others))
    return torch.tensor(lengths, dtype=torch.int64, device=counts.device)


def huffman_bits(counts: Tensor) -> float:
    """Return the bits of the whole stream in its own Huffman code, without the book: sum of count x length."""
    return (counts * huffman_lengths(counts)).sum().item()


def elias_omega_length(n: Tensor) -> Tensor:
    """Return the bits of the Elias omega code of integers n >= 1, elementwise: 1, 3, 3, 6, 6, 6, 6, 7 for 1 to 8."""
    length = torch.ones_like(n, dtype=torch.int64)
    for _ in range(5):  # 2^63 -> 62 -> 5 -> 2 -> 1
        log = _floor_log2(n)
        length += torch.where(n > 1, log + 1, 0)
        n = torch.where(n > 1, log, 1)
    return length


def _floor_log2(n: Tensor) -> Tensor:
    """Return floor(log2 n) of integers n >= 1 in integer arithmetic; a float log2 is wrong near large powers of two."""
    n = n.long()
    log = torch.zeros_like(n)
    for shift in (32, 16, 8, 4, 2, 1):
        large = n >> shift > 0
        log += torch.where(large, shift, 0)
        n = torch.where(large, n >> shift, n)
    return log


def ans_encode(codes: np.ndarray, counts: Any) -> bytes:
    """Encode symbols as one range-ANS bitstream of little-endian 32-bit words; requires the package `constriction`.

    Args:
        codes: uint8 [N], each below K.
        counts: integers [K], the frequency table that the receiver also has. Integers, because every rank must derive
            the same model. A symbol of count 0 can still be sent, at about 24 bits.
    """
    coder = _constriction().stream.stack.AnsCoder()
    coder.encode_reverse(np.ascontiguousarray(codes, dtype=np.int32), _model(counts))
    return coder.get_compressed().astype("<u4").tobytes()


def _model(counts: Any) -> Any:
    table = np.asarray(counts)
    if not np.issubdtype(table.dtype, np.integer):
        raise TypeError(f"a frequency table holds integers, got {table.dtype}")
    weights = np.pad(table.astype(np.float64), (0, max(0, 2 - len(table))))  # the package requires two symbols
    return _constriction().stream.model.Categorical(weights if weights.any() else weights + 1, perfect=False)


def _constriction() -> Any:
    try:
        import constriction
    except ImportError as error:
        raise ImportError("a real bitstream needs the package constriction; type: pip install constriction") from error
    return constriction


METHODS = ("none", "huffman", "elias", "ans")


def check_entropy(value: Any) -> str:
    """Return a method, after checking that it is known and that `ans` has its package."""
    checks.choice("entropy", value, METHODS)
    if value == "ans" and importlib.util.find_spec("constriction") is None:
        raise checks.ValueRefused(
            "entropy", "huffman where the package constriction is not installed", value, "huffman"
        )
    return value


def coded_bytes(codes: Tensor, levels: Sequence[float], method: str) -> int:
    """Return the bytes of one message's codes after entropy coding, with the book or table that the receiver needs.

    Args:
        codes: uint8 [N], indices into the codebook.
        levels: the codebook, ascending.
        method: `huffman`, the message's canonical code, plus a book of one length byte per level; `elias`, omega code
            of the magnitude's index with one sign bit if it is not zero, no book; `ans`, a real bitstream of the
            package `constriction` (on the CPU), plus a table of 4 bytes per level.
    """
    counts = torch.bincount(codes.flatten(), minlength=len(levels))
    if method == "huffman":
        return math.ceil(huffman_bits(counts) / 8) + len(levels)
    if method == "ans":
        table = counts.cpu().numpy()
        return len(ans_encode(codes.flatten().cpu().numpy(), table)) + 4 * len(levels)
    return math.ceil(int((counts * elias_code_lengths(levels).to(counts.device)).sum()) / 8)


def elias_code_lengths(levels: Sequence[float]) -> Tensor:
    """Return the bits of each level [K]: the omega code of its rank in magnitude, and a sign bit."""
    negative, index = sum(level < 0 for level in levels), torch.arange(len(levels))
    if 0.0 in levels:  # zero has no sign
        magnitude = (index - negative).abs()
        return elias_omega_length(magnitude + 1) + torch.where(magnitude > 0, 1, 0)
    magnitude = torch.where(index < negative, negative - 1 - index, index - negative)
    return elias_omega_length(magnitude + 1) + 1
