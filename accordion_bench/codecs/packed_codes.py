"""Packed codes: one small integer per coordinate, packed into bytes, and decoding by table look-up.

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
"""

import functools
import sys

import numpy as np
import torch
from torch import Tensor

from accordion_bench.codecs.index_codes import pack_bits, unpack_bits
from accordion_bench.tensors.upload import table

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
