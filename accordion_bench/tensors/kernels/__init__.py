"""Kernels: plain loops over the tensors of a bucket, compiled by numba where it is installed (the extra `fast`).

Nothing here knows a compressor. A kernel reads tensors by their addresses, and writes into a message or a sum that
exists; one call does for all tensors of a bucket. Modules of this package import numba, and those of `on_gpu` Triton,
so they are imported where they are used; `room_of` is asked first. What torch computes without them is the same, to the
bit where codes are concerned.
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from accordion_bench.tensors.kernels import on_gpu

if TYPE_CHECKING:
    from accordion_bench.tensors.kernels.rounding import Rounding
    from accordion_bench.tensors.kernels.table import Table
    from accordion_bench.tensors.permutations import Draws


class Room(Protocol):
    """What kernels do, where the tensors are. Addresses are int64 [W, T]; `like` is a tensor of the type that is there.

    W local workers, T tensors, M buckets of all of them, A senders, R rows of the sums, B bytes.
    """

    def bucket_norms(self, addresses: np.ndarray, table: "Table", norm: str, like: Tensor) -> Tensor:
        """The norm of every bucket, float64 [W, M]; NaN or infinity where one of its coordinates is."""

    def write_headers(self, scales: Tensor, table: "Table", message: Tensor) -> None:
        """Scales, float32 [W, M], into the messages [W, B]."""

    def read_headers(self, message: Tensor, table: "Table", alpha: float) -> Tensor:
        """Scales [A, M] of messages [A, B], times alpha."""

    def encode(
        self,
        addresses: np.ndarray,
        table: "Table",
        scales: Tensor | None,
        factors: Tensor,
        streams: Tensor,
        message: Tensor,
        like: Tensor,
        rounding: "Rounding",
    ) -> np.ndarray | None:
        """Scales and codes of coordinates into the messages [W, B].

        Args:
            addresses, table, message, like, rounding: see above.
            scales: of the buckets, float32 [W, M], in front of the codes; None = there are none.
            factors: what the coordinates of each bucket are multiplied by, float32 [W, M]; empty = 1.
            streams: of random numbers, the bits of uint64 as int64 [W, T]; empty where nothing is drawn.

        Returns:
            whether the coordinates of each tensor are finite, bool [W, T]; None on a GPU, where nobody waits.
        """

    def add_values(
        self,
        targets: np.ndarray,
        table: "Table",
        scales: Tensor | None,
        alpha: float,
        message: Tensor,
        values: Sequence[np.ndarray],
        like: Tensor,
        divisor: int,
        middles: Tensor | None = None,
        empty: bool = False,
    ) -> None:
        """target [R, N] += the sum, in order, of alpha x scale x value of code of each sender; then / divisor.

        Args:
            targets: addresses of the sums, [R, T].
            table, message, like: see above; sender a goes to row a mod R.
            scales: float32 [A, M]; None = those in front of the codes; empty = 1.
            alpha: by which scales are multiplied first.
            values: what the codes of each stream stand for, float32 [K]; those of a second stream are signs.
            divisor: of the whole, 1 for a sum.
            middles: what is added to values of two codes after they are scaled, float32 [A, M]; None = nothing.
            empty: the targets count as zeros, whatever they hold.
        """

    def draw(self, draws: "Draws", words: Tensor) -> Tensor:
        """The images of all tensors, each at its place in a buffer [room], for words int32 [T, 24] of their keys."""

    def gather(self, addresses: np.ndarray, draws: "Draws", places: Tensor, like: Tensor) -> Tensor:
        """The coordinates of rows at drawn places, [W, room]."""

    def scatter(
        self,
        addresses: np.ndarray,
        draws: "Draws",
        places: Tensor,
        values: np.ndarray,
        factors: tuple[float, ...],
        like: Tensor,
    ) -> None:
        """Coordinates of rows at drawn places += factor x value; each product and each sum is rounded once.

        Args:
            addresses, like: see above; of the sums.
            draws, places: see `draw`.
            values: addresses of k values of each row, [R, T].
            factors: of each tensor.
        """


@functools.cache
def installed() -> bool:
    """Whether numba is."""
    return importlib.util.find_spec("numba") is not None


def version() -> str:
    """Of numba; "" without it."""
    return importlib.metadata.version("numba") if installed() else ""


def usable(xs: Sequence[Tensor]) -> bool:
    """Whether compiled loops take these tensors: of one type, float32 or float64, in the memory of a CPU."""
    if not xs or not installed():
        return False
    kind = xs[0].dtype
    return kind in (torch.float32, torch.float64) and all(x.device.type == "cpu" and x.dtype == kind for x in xs)


def room_of(xs: Sequence[Tensor]) -> Room | None:
    """The kernels that take these tensors; None: torch must do it."""
    if usable(xs):
        from accordion_bench.tensors.kernels import on_cpu

        return on_cpu
    if on_gpu.usable(xs):
        from accordion_bench.tensors.kernels.on_gpu import room

        return room
    return None
