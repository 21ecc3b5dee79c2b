"""Passes over a tile: torch makes them on an accelerator, numpy on a CPU, where torch goes one by one.

Both give the same codes and the same sums of decoded messages; norms may differ in the last bit.
"""

import functools
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from accordion_bench.compressors import packed_codes
from accordion_bench.compressors.non_finite_row import NonFiniteRow
from accordion_bench.compressors.rounding.tiling import add_products_
from accordion_bench.tensors.counter_rng import BLOCK


class Passes(Protocol):
    """What rounding does to a tile [rows, columns]; a name that ends in `_` writes into its first argument.

    tile: coordinates at a time: whole blocks of random bits and, for any code, whole bytes (40 codes).
    counted: up to so many thresholds, each is compared with in turn; beyond, a binary search is faster.
    """

    tile: int
    counted: int

    def sum_of_squares(self, part: Tensor) -> Tensor:
        """Over the last dimension, of float64."""

    def sum(self, part: Tensor) -> Tensor:
        """Over the last dimension, which stays with length 1."""

    def leading_bits_(self, words: Tensor, bits: int) -> None:
        """The leading bits of random words, int32, as integers."""

    def truncate_(self, code: Tensor, r: Tensor) -> None:
        """code = r without its fraction, uint8."""

    def greater_(self, out: Tensor, r: Tensor, threshold: Tensor) -> None:
        """out = r > threshold, as 0 and 1 in uint8."""

    def negative_(self, out: Tensor, x: Tensor) -> None:
        """out = x < 0, as 0 and 1 in uint8."""

    def thresholds_within(self, starts: Tensor, r: Tensor) -> int:
        """How many of the ascending thresholds from `starts` on must be computed, at least 1."""

    def refuse_rows(self, x_R: Tensor) -> None:
        """Raise NonFiniteRow for rows that hold NaN or infinity, where all rows are looked at before the tiles."""

    def refuse_tile(self, x: Tensor, first_row: int) -> None:
        """The same where each tile is looked at while it is in the cache."""

    def store_(self, message: Tensor, code: Tensor, K: int) -> None:
        """message = the packed codes, bytes [rows, code_bytes(columns, K)]."""

    def add_decoded_(
        self, sums: Tensor, packed: Tensor, levels: tuple[float, ...], norms_A: Tensor, start: int, size: int
    ) -> None:
        """sums [senders, columns] += norm x level[code] of each sender, see `sums.add_levels_`."""


class DevicePasses:
    """Torch, on whatever device the tensors are."""

    tile = 10_000 * BLOCK
    counted = 2

    def sum_of_squares(self, part: Tensor) -> Tensor:
        return torch.linalg.vecdot(part, part)

    def sum(self, part: Tensor) -> Tensor:
        return part.sum(-1, keepdim=True, dtype=torch.float64)

    def leading_bits_(self, words: Tensor, bits: int) -> None:
        words.bitwise_right_shift_(32 - bits).bitwise_and_((1 << bits) - 1)

    def truncate_(self, code: Tensor, r: Tensor) -> None:
        code.copy_(r)

    def greater_(self, out: Tensor, r: Tensor, threshold: Tensor) -> None:
        torch.gt(r, threshold, out=out.view(torch.bool))

    def negative_(self, out: Tensor, x: Tensor) -> None:
        torch.lt(x, 0, out=out.view(torch.bool))

    def thresholds_within(self, starts: Tensor, r: Tensor) -> int:
        return len(starts)

    def refuse_rows(self, x_R: Tensor) -> None:
        refuse_non_finite(x_R)

    def refuse_tile(self, x: Tensor, first_row: int) -> None:
        pass

    def store_(self, message: Tensor, code: Tensor, K: int) -> None:
        message.copy_(packed_codes.pack_on_device(code, K))

    def add_decoded_(
        self, sums: Tensor, packed: Tensor, levels: tuple[float, ...], norms_A: Tensor, start: int, size: int
    ) -> None:
        values = packed_codes.look_up_on_device(packed, levels, sums.shape[1])
        add_products_(sums, values, norms_A, start, size, set(levels) == {-1.0, 1.0})


class CpuPasses:
    """Numpy, on a CPU's memory."""

    tile = 80 * BLOCK
    counted = 64

    def sum_of_squares(self, part: Tensor) -> Tensor:
        return torch.from_numpy(np.vecdot(part.numpy(), part.numpy()))

    def sum(self, part: Tensor) -> Tensor:
        # pairwise in float32 within a tile: twice as fast, and off by no more than the result's own rounding
        return part.sum(-1, keepdim=True, dtype=torch.float32)

    def leading_bits_(self, words: Tensor, bits: int) -> None:
        unsigned = words.numpy().view(np.uint32)
        np.right_shift(unsigned, np.uint32(32 - bits), out=unsigned)

    def truncate_(self, code: Tensor, r: Tensor) -> None:
        np.copyto(code.numpy(), r.numpy(), casting="unsafe")  # torch converts to uint8 one by one

    def greater_(self, out: Tensor, r: Tensor, threshold: Tensor) -> None:
        np.greater(r.numpy(), threshold.numpy(), out=out.numpy().view(np.bool_))  # torch compares one by one

    def negative_(self, out: Tensor, x: Tensor) -> None:
        np.less(x.numpy(), 0, out=out.numpy().view(np.bool_))

    def thresholds_within(self, starts: Tensor, r: Tensor) -> int:
        if len(starts) <= 2:
            return len(starts)
        # a threshold at or above the largest r counts nothing
        return max(1, int(np.searchsorted(starts.numpy(), r.numpy().max())))

    def refuse_rows(self, x_R: Tensor) -> None:
        pass

    def refuse_tile(self, x: Tensor, first_row: int) -> None:
        # a product with zeros is NaN where a factor is not finite: the cheapest pass that tells
        with np.errstate(invalid="ignore"):
            finite = not np.isnan(np.vecdot(x.numpy(), _zeros(x.shape[1]))).any()
        if not finite:
            raise NonFiniteRow(first_row + int((~x.isfinite()).any(1).nonzero()[0]))

    def store_(self, message: Tensor, code: Tensor, K: int) -> None:
        message.numpy()[:] = packed_codes.pack_on_cpu(code.numpy(), K)

    def add_decoded_(
        self, sums: Tensor, packed: Tensor, levels: tuple[float, ...], norms_A: Tensor, start: int, size: int
    ) -> None:
        count = sums.shape[1]
        if len(packed) == 1 and start // size == (start + count - 1) // size:
            # one norm for all: the table is multiplied, not the many values
            sums += packed_codes.look_up(packed, levels, count, norms_A[:, start // size].item())
            return
        values = packed_codes.look_up(packed, levels, count)
        add_products_(sums, values, norms_A, start, size, set(levels) == {-1.0, 1.0})


@functools.lru_cache(maxsize=8)
def _zeros(n: int) -> np.ndarray:
    return np.zeros(n, np.float32)


CPU: Passes = CpuPasses()
DEVICE: Passes = DevicePasses()


def passes_on(device: torch.device) -> Passes:
    """Who makes the passes over tensors on this device."""
    return CPU if device.type == "cpu" else DEVICE


def refuse_non_finite(values_R: Tensor) -> None:
    """Raise NonFiniteRow for the first row on the CPU that holds NaN or infinity.

    On a device nobody waits for the answer here: what is not finite shows in the exchange's flags, read once per step.
    """
    if values_R.device.type != "cpu":
        return
    finite_R = values_R.isfinite()
    if not finite_R.all():
        raise NonFiniteRow(int((~finite_R).any(1).nonzero()[0]))
