"""Index codes: packing of bits (least significant bit first), and sorted indices in the smaller of two codes.

The size of both codes depends on (n, k) only, so messages need no header and predicted sizes are exact:

    bitmap       one bit per coordinate                                            n bits
    elias-fano   l low bits of each index in binary, the high bits in unary        k l + k + floor((n - 1) / 2^l) bits

Elias-Fano is Rice coding of the gaps with a separate stream of quotients, so that encoding and decoding are vector
operations. A list of int32 is never smaller. Source: Elias 1974; Fano 1971.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

CACHED = 4096  # cached sizes; counts that depend on the data repeat for a short time only


def pack_bits(bits_W: Tensor) -> Tensor:
    """Pack booleans [W, N] into bytes [W, ceil(N / 8)]; the first boolean is the least significant bit."""
    if bits_W.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits_W.numpy(), axis=1, bitorder="little"))
    return pack_bits_on_device(bits_W)


def pack_bits_on_device(bits_W: Tensor) -> Tensor:
    """Pack booleans as `pack_bits`, by operations of torch."""
    padded = torch.nn.functional.pad(bits_W.to(torch.uint8), (0, -bits_W.shape[1] % 8)).unflatten(1, (-1, 8))
    return (padded << torch.arange(8, device=bits_W.device, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def unpack_bits(bytes_W: Tensor, count: int) -> Tensor:
    """Unpack the first `count` booleans of each row; inverse of `pack_bits`."""
    if bytes_W.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bytes_W.numpy(), axis=1, count=count, bitorder="little")).bool()
    return _unpack_on_device(bytes_W, count)


def _unpack_on_device(bytes_W: Tensor, count: int) -> Tensor:
    shifts = torch.arange(8, device=bytes_W.device, dtype=torch.uint8)
    return ((bytes_W[..., None] >> shifts) & 1).flatten(1)[:, :count].bool()


def _elias_fano_bits(n: int, k: int, low: int) -> tuple[int, int]:
    return k * low, k + ((n - 1) >> low)


def _bytes(bits: Any) -> Any:
    return (bits + 7) // 8


@functools.lru_cache(CACHED)
def _low_bits(n: int, k: int) -> int:
    """Return the number of low bits that minimises the size of the message."""
    # one more bit costs k bits and saves (n - 1) / 2^(low + 1), so the optimum is near log2((n - 1) / k);
    # rounding to bytes moves it by a few
    near = ((n - 1) // k).bit_length()
    choices = range(max(0, near - 4), min(n.bit_length(), near + 3))
    return min(choices, key=lambda low: sum(map(_bytes, _elias_fano_bits(n, k, low))))


@functools.lru_cache(CACHED)
def index_bytes(n: int, k: int) -> tuple[str, int]:
    """Return the name of the smaller code for k sorted indices below n, and its size in bytes."""
    if k == 0:
        return "bitmap", 0
    elias_fano = sum(map(_bytes, _elias_fano_bits(n, k, _low_bits(n, k))))
    return ("elias-fano", elias_fano) if elias_fano < _bytes(n) else ("bitmap", _bytes(n))


def code_shapes(n: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the shapes of the smaller codes for many n and k.

    A bitmap counts as a code without low bits, in which the position of a high bit is the index.

    Returns:
        1 for Elias-Fano, where each index shifts the high bits of the next by one, else 0; low bits of an index; bytes
        of all low bits; bytes of the high bits. All int64, 0 bytes where k is 0.
    """
    last, some = np.maximum(n - 1, 0), np.maximum(k, 1)
    lows = np.maximum(np.frexp(last // some)[1] - 4, 0)[:, None] + np.arange(8)
    near, most = np.frexp(last // some)[1], np.frexp(n)[1]
    allowed = lows < np.minimum(most, near + 3)[:, None]
    low_bytes, high_bytes = _bytes(k[:, None] * lows), _bytes(k[:, None] + (last[:, None] >> lows))
    best = np.where(allowed, low_bytes + high_bytes, np.iinfo(np.int64).max).argmin(1)[:, None]
    low, low_bytes, high_bytes = (np.take_along_axis(x, best, 1)[:, 0] for x in (lows, low_bytes, high_bytes))
    bitmap = low_bytes + high_bytes >= _bytes(n)
    bitmap |= k == 0
    by_rank, low, low_bytes = (np.where(bitmap, 0, x) for x in (np.ones_like(k), low, low_bytes))
    high_bytes = np.where(bitmap, _bytes(n), high_bytes)
    return by_rank, low, np.where(k == 0, 0, low_bytes), np.where(k == 0, 0, high_bytes)


def encode_indices(indices_W: Tensor, n: int) -> Tensor:
    """Encode ascending indices [W, k] below n as bytes [W, index_bytes(n, k)]."""
    workers, k = indices_W.shape
    device = indices_W.device
    if k == 0:
        return torch.empty(workers, 0, dtype=torch.uint8, device=device)
    if index_bytes(n, k)[0] == "bitmap":
        return pack_bits(torch.zeros(workers, n, dtype=torch.bool, device=device).scatter_(1, indices_W, True))
    low = _low_bits(n, k)
    low_bits = torch.zeros(workers, k * low, dtype=torch.bool, device=device)
    for bit in range(low):
        low_bits[:, bit::low] = (indices_W >> bit) & 1
    unary = torch.zeros(workers, _elias_fano_bits(n, k, low)[1], dtype=torch.bool, device=device)
    unary.scatter_(1, (indices_W >> low) + torch.arange(k, device=device), True)
    return torch.cat([pack_bits(low_bits), pack_bits(unary)], dim=1)


def decode_indices(message_W: Tensor, n: int, k: int) -> Tensor:
    """Decode ascending indices [W, k]; inverse of `encode_indices`."""
    workers, device = message_W.shape[0], message_W.device
    if k == 0:
        return torch.empty(workers, 0, dtype=torch.int64, device=device)
    if index_bytes(n, k)[0] == "bitmap":
        return _ones_at(unpack_bits(message_W, n), k)
    low = _low_bits(n, k)
    low_count, unary_count = _elias_fano_bits(n, k, low)
    low_bytes, unary_bytes = message_W.split([_bytes(low_count), _bytes(unary_count)], dim=1)
    high = _ones_at(unpack_bits(unary_bytes.contiguous(), unary_count), k)
    high = high - torch.arange(k, device=device)
    low_bits = unpack_bits(low_bytes.contiguous(), low_count)
    indices = high << low
    for bit in range(low):
        indices += low_bits[:, bit::low].long() << bit
    return indices


def _ones_at(bits_W: Tensor, k: int) -> Tensor:
    """Return the positions of the k ones of each row, [W, k]."""
    workers = bits_W.shape[0]
    if bits_W.device.type == "cpu":
        return bits_W.nonzero()[:, 1].view(workers, k)
    return torch.nonzero_static(bits_W, size=workers * k)[:, 1].view(workers, k)
