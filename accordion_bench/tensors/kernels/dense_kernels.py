"""DenseKernels: what compiled kernels do for dense codes and drawn coordinates, and what they are told.

Nothing here imports numba or Triton.

Tensor suffixes: W local workers, T tensors, M buckets of all of them, A senders, R rows of the sums, B bytes.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.kernels.rounding import KernelRounding
from accordion_bench.tensors.kernels.table import Table, addresses, contiguous
from accordion_bench.tensors.upload import upload

if TYPE_CHECKING:
    from accordion_bench.tensors.permutations import Draws

NORMS = ("l1", "l2", "linf", "sum", "below", "count")


class Fed(NamedTuple):
    """What is read in the place of x: p = a x + (d e + b u). Who makes codes writes e <- m (p - what they stand for).

    Each product and each sum is rounded once; a sum with a product with the weight or with b, as a whole.

    residuals_W: e [W, N] of each tensor, coordinates of a part side by side.
    weight: a of all tensors.
    rates: a of each tensor, on the device; empty = the weight.
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
    """Tensors of one type, by where the part of each worker begins.

    Args:
        rows_W: the tensors [W, N]; the coordinates of a part lie side by side.
        fed: by what, where that is added as they are read; on a GPU alone.
    """

    rows_W: Sequence[Tensor]
    fed: Fed | None = None

    @classmethod
    def of(cls, rows_W: Sequence[Tensor], fed: Fed | None = None) -> "Coordinates":
        """Of any tensors [W, N]: copied where the coordinates of a part lie apart."""
        return cls(list(map(contiguous, rows_W)), fed)

    @functools.cached_property
    def addresses(self) -> np.ndarray:
        """Int64 [W, T]."""
        return addresses(self.rows_W)

    @functools.cached_property
    def fed_addresses(self) -> np.ndarray:
        """Of residuals [W, T], rates, masks and momenta, int64 [W + 3, T]; 0 where there is none."""
        if self.fed is None:
            return self.addresses[:0]
        none, fed = [None] * len(self.rows_W), self.fed
        given = [[0 if x is None else x.data_ptr() for x in own or none] for own in (fed.rates, fed.masks, fed.momenta)]
        return np.concatenate([addresses(fed.residuals_W), np.array(given, np.int64)])

    @functools.cached_property
    def on_device(self) -> Tensor:
        """Both, one below the other, where the tensors are: uploaded once for all kernels that read these tensors."""
        return upload(torch.from_numpy(np.concatenate([self.addresses, self.fed_addresses])), self.like.device)

    @property
    def like(self) -> Tensor:
        """A tensor of their type, where they are."""
        return self.rows_W[0]


class BlockRule(NamedTuple):
    """How norms of a block of n coordinates become the float32 numbers that codes need.

    kind: `scale`: the norm over a divisor, as a scale, and the factor of coordinates where it has one. `means`: of the
        non-negative and of the negative coordinates, as middle + half and middle - half. `largest`: the largest
        magnitude, at most `clip` standard deviations; alike coordinates are not cut.
    norms: of which it is made, in order.
    over: divisor: `n`, `root n`, `largest`, where what is no normal float32 counts as zero; "" = 1.
    largest: the largest value of a code.
    factor: `inverse` of the scale; `levels`: see `codecs.block_numbers.level_factors`; "" = 1.
    top: the level that a coordinate as large as its scale is multiplied to.
    clip: standard deviations.
    """

    kind: str
    norms: tuple[str, ...]
    over: str = ""
    largest: float = 1.0
    factor: str = ""
    top: float = 1.0
    clip: float = 0.0


class Encoding(NamedTuple):
    """How coordinates become codes.

    rounding: to which codes.
    scales: of the buckets, float32 [W, M], written in front of the codes; None = there are none.
    factors: what the coordinates of each bucket are multiplied by, float32 [W, M]; empty = 1.
    streams: of random numbers, the bits of uint64 as int64 [W, T]; empty where nothing is drawn.
    measured: how scales and factors come from the coordinates that are read; None = they are given. On a GPU alone.
    values: what the codes of each stream stand for, see `Decoding`; where coordinates are fed.
    middles: of these values, see `Decoding`.
    """

    rounding: KernelRounding
    scales: Tensor | None
    factors: Tensor
    streams: Tensor
    measured: BlockRule | None = None
    values: Sequence[np.ndarray] = ()
    middles: Tensor | None = None


class Decoding(NamedTuple):
    """How codes become values.

    values: what the codes of each stream stand for, float32 [K]; those of a second stream are signs.
    scales: by which values are multiplied, float32 [A, M]; None = those in front of the codes; empty = 1.
    alpha: by which scales are multiplied first.
    middles: what is added to values of two codes after they are scaled, float32 [A, M]; None = nothing.
    divisor: of the sum.
    empty: the targets count as zeros, whatever they hold.
    """

    values: Sequence[np.ndarray]
    scales: Tensor | None
    alpha: float = 1.0
    middles: Tensor | None = None
    divisor: int = 1
    empty: bool = False


class DenseKernels(Protocol):
    """What kernels do, where the tensors are."""

    def bucket_norms(self, x: Coordinates, table: Table, kinds: Sequence[str]) -> list[Tensor]:
        """Norms of every bucket, float64 [W, M] of each kind; NaN or infinity where one of its coordinates is.

        Args:
            x: coordinates; they are read as float32.
            table: lengths and buckets.
            kinds: some of `NORMS`: `l1`, `l2`, `linf`; `sum` of coordinates, `below`: of the negative ones, `count`:
                how many these are.
        """

    def write_headers(self, scales: Tensor, table: Table, message: Tensor) -> None:
        """Scales, float32 [W, M], into the messages [W, B]."""

    def read_headers(self, message: Tensor, table: Table, alpha: float) -> Tensor:
        """Scales [A, M] of messages [A, B], times alpha."""

    def encode(self, x: Coordinates, table: Table, message: Tensor, encoding: Encoding) -> np.ndarray | None:
        """Scales and codes of coordinates into the messages [W, B].

        Returns:
            whether the coordinates of each tensor are finite, bool [W, T], looked at for powers and signs alone; None
            on a GPU, where it is not looked at.
        """

    def add_values(self, targets: Coordinates, table: Table, message: Tensor, decoding: Decoding) -> None:
        """target [R, N] += the sum, in order, of alpha x scale x value of code of each sender; then / divisor.

        Sender a of the messages [A, B] goes to row a mod R. Each product and each sum is rounded once.
        """

    def draw(self, draws: "Draws", words: Tensor) -> Tensor:
        """The images of all tensors, each at its place in a buffer [draws.room], for words int32 [T, 24] of keys."""

    def gather(self, x: Coordinates, draws: "Draws", places: Tensor) -> Tensor:
        """The coordinates of rows at drawn places, [W, draws.room]."""

    def scatter(
        self, targets: Coordinates, draws: "Draws", places: Tensor, values: Coordinates, factors: tuple[float, ...]
    ) -> None:
        """Coordinates of rows at drawn places += factor x value; each product and each sum is rounded once.

        Args:
            targets: the sums [R, N].
            draws, places: see `draw`.
            values: k values of each row, [R, k].
            factors: of each tensor.
        """


def array_like(x: Tensor) -> np.ndarray:
    """An empty array of the type of a CPU's tensor."""
    return x.numpy()[:0].reshape(0)
