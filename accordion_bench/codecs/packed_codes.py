"""Packing of bits, of a small integer per coordinate (decoded by table look-up), and of sorted indices.

    levels K      code                                               bytes for n codes
    1..2          1 bit                                              ceil(n / 8)
    3             5 per byte, c0 + 3 c1 + 9 c2 + 27 c3 + 81 c4       ceil(n / 5)
    4             2 bits                                             ceil(n / 4)
    5..8          3 bits, 8 codes in 3 bytes                         3 ceil(n / 8)
    9..16         4 bits                                             ceil(n / 2)
    17..128       5, 6 or 7 bits, 8 codes in as many bytes           (5, 6, 7) ceil(n / 8)
    129..256      8 bits                                             n

Bits are in little-endian order: code i of b bits occupies bits b i .. b i + b - 1 of the message, least significant bit
of a byte first. Bits after the last code are zero. For every K, 40 codes fill whole bytes.

Sorted indices use the smaller of two codes. The size of both depends on (n, k) only, so messages need no header and
predicted sizes are exact:

    bitmap       one bit per coordinate                                            n bits
    elias-fano   l low bits of each index in binary, the high bits in unary        k l + k + floor((n - 1) / 2^l) bits

Elias-Fano is Rice coding of the gaps with a separate stream of quotients, so that encoding and decoding are vector
operations. A list of int32 is never smaller. Source: Elias 1974; Fano 1971.
"""

import functools
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.upload import table

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


assert sys.byteorder == "little", "codes are packed by viewing bytes as little-endian words"

_WORDS = {2: torch.int32, 4: torch.int16}  # dtype of a word that is packed into one byte; else 8 codes in 64 bits


def code_width(levels: int) -> int:
    """Return the number of bits of a code below `levels`; ternary codes are an exception, 1.6 bits each.

    Raises:
        ValueError: levels not in 1..256.
    """
    if not 1 <= levels <= 256:
        raise ValueError(f"codes have 1 to 256 levels, got {levels}")
    return max(1, (levels - 1).bit_length())


def code_bytes(n: int, levels: int) -> int:
    """Return the number of bytes of n packed codes."""
    width = code_width(levels)
    if levels == 3:
        return -(-n // 5)
    return -(-n // (8 // width)) if 8 % width == 0 else width * -(-n // 8)


@functools.cache
def _joins(width: int) -> list[tuple[int, int, int]]:
    """Return steps that join adjacent codes, initially one per byte: (shift, mask of the lower, mask of both)."""
    bits = 8 * _WORDS.get(width, torch.int64).itemsize
    steps, lane, used = [], 8, width
    while lane < bits:
        lower, both = (
            sum(((1 << many) - 1) << start for start in range(0, bits, 2 * lane)) for many in (used, 2 * used)
        )
        steps.append((lane - used, lower, both))
        lane, used = 2 * lane, 2 * used
    return steps


@functools.cache
def _table(values: tuple[float, ...]) -> np.ndarray:
    """Return the values of all codes in a byte, float32 [bytes, codes]; 3 bits: in 12 bits; 5 or more: of one code."""
    levels, width = len(values), code_width(len(values))
    base, digits = (3, 5) if levels == 3 else (2**width, {1: 8, 2: 4, 3: 4, 4: 2}.get(width, 1))
    fields = np.arange(base**digits)[:, None] // base ** np.arange(digits) % base
    return np.array(values, np.float32)[fields.clip(max=levels - 1)]


def pack_codes(codes_R: Tensor, levels: int) -> Tensor:
    """Pack codes below `levels`, uint8 [R, N], into bytes [R, code_bytes(N, levels)]."""
    rows, n = codes_R.shape
    width, size = code_width(levels), code_bytes(n, levels)
    if width == 1:
        return pack_bits(codes_R.bool())
    if width == 8:
        return codes_R.clone()
    padded = torch.nn.functional.pad(codes_R, (0, -n % (5 if levels == 3 else 8))).contiguous()
    if levels == 3:
        fives = padded.view(rows, size, 5)
        return sum(fives[..., digit] * 3**digit for digit in range(5)).to(torch.uint8)
    words = padded.flatten().view(_WORDS.get(width, torch.int64))
    for shift, lower, both in _joins(width):
        words = (words & lower) | (words >> shift & (both ^ lower))
    word_bytes = words.view(torch.uint8).view(-1, words.element_size())
    used_bytes = word_bytes[:, : 1 if width in _WORDS else width].reshape(rows, code_bytes(padded.shape[1], levels))
    return used_bytes[:, :size].contiguous()


def unpack_codes(bytes_R: Tensor, levels: int, count: int) -> Tensor:
    """Unpack the first `count` codes of each row, uint8 [R, count]; inverse of `pack_codes`."""
    width = code_width(levels)
    if width == 1:
        return unpack_bits(bytes_R, count).to(torch.uint8)
    if width == 8:
        return bytes_R[:, :count].clone()
    if levels == 3:
        return torch.stack([bytes_R // 3**digit % 3 for digit in range(5)], dim=-1).flatten(1)[:, :count]
    if width in _WORDS:
        words = bytes_R.flatten().to(_WORDS[width])
    else:
        words = torch.nn.functional.pad(bytes_R.reshape(-1, width), (0, 8 - width)).flatten().view(torch.int64)
    for shift, lower, both in reversed(_joins(width)):
        words = (words & lower) | (words & (both ^ lower)) << shift
    codes = words.view(torch.uint8)
    return codes.view(len(bytes_R), len(codes) // max(1, len(bytes_R)))[:, :count]


def floats_in(bytes_S: Tensor) -> Tensor:
    """Reinterpret bytes [..., 4 m] as float32 [..., m]; a copy, because fields may be unaligned."""
    if not bytes_S.shape[-1]:
        return bytes_S.float()  # torch cannot view empty tensors with other strides
    return bytes_S.clone(memory_format=torch.contiguous_format).view(torch.float32)


def look_up(bytes_R: Tensor, values: tuple[float, ...], count: int) -> Tensor:
    """Return values[code] of the first `count` packed codes of each row, float32 [R, count]."""
    rows = _table_on(values, bytes_R.device)
    # look up whole bytes where a byte contains whole codes, otherwise (3, 5, 6 and 7 bits) single codes
    fields = unpack_codes(bytes_R, len(values), count) if code_width(len(values)) in (3, 5, 6, 7) else bytes_R
    if code_width(len(values)) == 3:
        rows = rows[: 1 << 3, :1]  # values of one code, not of four
    return rows.index_select(0, fields.flatten().int()).view(len(bytes_R), -1)[:, :count]


@functools.lru_cache(maxsize=64)
def _table_on(values: tuple[float, ...], device: torch.device) -> Tensor:
    rows = _table(values)
    if len(values) == 3:  # bytes above 242 occur in malformed messages only
        rows = np.pad(rows, ((0, 256 - len(rows)), (0, 0)), mode="edge")
    return table(torch.from_numpy(rows), device)
