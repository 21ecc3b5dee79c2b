"""DenseKernels: interface of compiled kernels for dense codes and drawn coordinates, with their parameters.

This module imports neither numba nor Triton.

Tensor suffixes: W local workers, T tensors, M buckets of all of them, A senders, R rows of the sums, B bytes.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.kernels.table import Table, addresses, contiguous
from accordion_bench.tensors.upload import upload

if TYPE_CHECKING:
    from accordion_bench.tensors.permutations import Draws

EVEN, SYMMETRIC, ANY, INTEGER, RANDOM_INTEGER, E4M3, E5M2, E3M0, POWERS, SIGNS = range(10)  # kinds of rounding
NORMS = ("l1", "l2", "linf", "sum", "below", "count")
_NONE = np.empty(0, np.float32)


class ResidualInputs(NamedTuple):
    """Residuals and momenta: kernels read p = a x + (d e + b u) in place of x; encoders write e <- m (p - decoded).

    Each product and each sum is rounded once, but a sum with a product with the weight or with b is one operation.

    residuals_W: e [W, N] of each tensor, with contiguous rows.
    weight: a of all tensors.
    rates: a of each tensor, on the device; empty = `weight`.
    decay: d.
    masks: m [N] of each tensor, or None for 1; empty = 1 for all.
    momenta: u [N] of each tensor; empty, or None for each, = 0.
    momentum: b.
    """

    residuals_W: Sequence[Tensor]
    weight: float = 1.0
    rates: Sequence[Tensor] = ()
    decay: float = 1.0
    masks: Sequence[Tensor | None] = ()
    momenta: Sequence[Tensor | None] = ()
    momentum: float = 0.0


@dataclass(frozen=True)
class Coordinates:
    """Addresses of tensors of one dtype.

    Args:
        rows_W: tensors [W, N] with contiguous rows.
        fed: residuals and momenta that kernels add in their read; on a GPU only.
    """

    rows_W: Sequence[Tensor]
    fed: ResidualInputs | None = None

    @classmethod
    def of(cls, rows_W: Sequence[Tensor], fed: ResidualInputs | None = None) -> "Coordinates":
        """Return the addresses of any tensors [W, N]; rows that are not contiguous are copied."""
        return cls(list(map(contiguous, rows_W)), fed)

    @functools.cached_property
    def addresses(self) -> np.ndarray:
        """Address of each row, int64 [W, T]."""
        return addresses(self.rows_W)

    @functools.cached_property
    def fed_addresses(self) -> np.ndarray:
        """Addresses of residuals [W, T], rates, masks and momenta, int64 [W + 3, T]; 0 = none."""
        if self.fed is None:
            return self.addresses[:0]
        none, fed = [None] * len(self.rows_W), self.fed
        given = [[0 if x is None else x.data_ptr() for x in own or none] for own in (fed.rates, fed.masks, fed.momenta)]
        return np.concatenate([addresses(fed.residuals_W), np.array(given, np.int64)])

    @functools.cached_property
    def on_device(self) -> Tensor:
        """Both tables of addresses, concatenated, on the device of the tensors; uploaded once for all kernels."""
        return upload(torch.from_numpy(np.concatenate([self.addresses, self.fed_addresses])), self.like.device)

    @property
    def like(self) -> Tensor:
        """Tensor with the dtype and the device of the coordinates."""
        return self.rows_W[0]


class BlockRule(NamedTuple):
    """Rule from norms of a block of n coordinates to the float32 numbers of its codes.

    kind: `scale`: norm / divisor, and the factor of coordinates if `factor` is set. `means`: means of the non-negative
        and of the negative coordinates, as middle + half and middle - half. `largest`: largest magnitude, clipped at
        `clip` standard deviations; blocks of equal coordinates are not clipped.
    norms: required norms, in order.
    over: divisor: `n`; `root n`; `largest`, with scales that are not normal float32 set to zero; "" = 1.
    largest: largest value of a code.
    factor: `inverse` of the scale; `levels`: see `codecs.coding.level_factors`; "" = 1.
    top: scaled value of a coordinate that equals its scale.
    clip: number of standard deviations.
    """

    kind: str
    norms: tuple[str, ...]
    over: str = ""
    largest: float = 1.0
    factor: str = ""
    top: float = 1.0
    clip: float = 0.0


class KernelRounding(NamedTuple):
    """Parameters of rounding from coordinates to codes.

    kind: EVEN, SYMMETRIC, ANY: to levels, see `codecs.coding`; INTEGER, RANDOM_INTEGER, E4M3, E5M2: to 8-bit numbers;
        E3M0: to 4-bit numbers; POWERS: to exponents, with signs as a second stream; SIGNS.
    K: number of codes of the first stream.
    bits: number of random bits per coordinate; 0 = deterministic.
    scale: scale of an even grid.
    starts, widths: thresholds between levels.
    central: start and width of the threshold for the sign; empty = the threshold is zero.
    """

    kind: int
    K: int
    bits: int = 0
    scale: float = 1.0
    starts: np.ndarray = _NONE
    widths: np.ndarray = _NONE
    central: np.ndarray = _NONE


class Encoding(NamedTuple):
    """Parameters of encoding.

    rounding: rounding to codes.
    scales: scales of the buckets, float32 [W, M], written to the header; None = no header.
    factors: factors of the coordinates of each bucket, float32 [W, M]; empty = 1.
    streams: starts of random streams, uint64 as int64 [W, T]; empty if deterministic.
    measured: rule from coordinates to scales and factors in the same read, on a GPU only; None = scales are given.
    values: values of the codes of each stream, see `Decoding`; required if coordinates have residuals.
    middles: offsets of these values, see `Decoding`.
    """

    rounding: KernelRounding
    scales: Tensor | None
    factors: Tensor
    streams: Tensor
    measured: BlockRule | None = None
    values: Sequence[np.ndarray] = ()
    middles: Tensor | None = None


class Decoding(NamedTuple):
    """Parameters of decoding.

    values: values of the codes of each stream, float32 [K]; those of a second stream are signs.
    scales: factors of the values, float32 [A, M]; None = scales in the header; empty = 1.
    alpha: factor of the scales.
    middles: offsets of the scaled values of two codes, float32 [A, M]; None = 0.
    divisor: divisor of the sum.
    empty: whether targets are uninitialised, and count as zeros.
    """

    values: Sequence[np.ndarray]
    scales: Tensor | None
    alpha: float = 1.0
    middles: Tensor | None = None
    divisor: int = 1
    empty: bool = False


class DenseKernels(Protocol):
    """Kernels of one device, which compute operations of `codecs.engine.Engine`."""

    def bucket_norms(self, x: Coordinates, table: Table, kinds: Sequence[str]) -> list[Tensor]:
        """Return norms of every bucket, float64 [W, M] for each of `kinds`; coordinates are read as float32.

        See `Engine.norms`.
        """

    def write_headers(self, scales: Tensor, table: Table, message: Tensor) -> None:
        """Write scales, float32 [W, M], into messages [W, B]."""

    def read_headers(self, message: Tensor, table: Table, alpha: float) -> Tensor:
        """Return the scales [A, M] of messages [A, B], times alpha."""

    def encode(self, x: Coordinates, table: Table, message: Tensor, encoding: Encoding) -> np.ndarray | None:
        """Write scales and codes of coordinates into messages [W, B].

        Returns:
            whether the coordinates of each tensor are finite, bool [W, T], checked for powers and signs only; None on
            a GPU, where it is not checked.
        """

    def add_values(self, targets: Coordinates, table: Table, message: Tensor, decoding: Decoding) -> None:
        """Add decoded messages [A, B] in order, a to row a mod R of targets [R, N], see `Engine.add_codes`."""

    def draw(self, draws: "Draws", words: Tensor) -> Tensor:
        """Return the drawn coordinates of all tensors in one buffer [draws.room], for words int32 [T, 24] of keys."""

    def gather(self, x: Coordinates, draws: "Draws", places: Tensor) -> Tensor:
        """Return the values at drawn coordinates, [W, draws.room]."""

    def scatter(
        self, targets: Coordinates, draws: "Draws", places: Tensor, values: Coordinates, factors: tuple[float, ...]
    ) -> None:
        """Add factor x values [R, k] of each tensor to sums [R, N] at drawn coordinates; each result rounded once."""


def array_like(x: Tensor) -> np.ndarray:
    """Return an empty array with the dtype of a CPU tensor."""
    return torch.empty(0, dtype=x.dtype).numpy()
