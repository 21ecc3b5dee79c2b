"""Engine: the operations on a bucket of tensors that codecs are written against.

A codec is one text: it says which fields its messages have (`Layout`) and how coordinates become codes (`Coding`), and
calls what is below. The engine hides the device and how something is computed there. `Reference` computes it in plain
torch, tensor by tensor; the others give the same messages bit for bit, and sums within rounding.

Tensor suffixes: W local workers, S senders, T tensors, M blocks of all tensors.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Target
from accordion_bench.codecs.coding import Coding, middle_and_half
from accordion_bench.codecs.layout import KEPT, Layout, Message
from accordion_bench.codecs.non_finite import NonFiniteRow
from accordion_bench.tensors.upload import table


class Engine(ABC):
    """The operations on a bucket.

    Class attributes:
        name: of what computes, as a run's header says it.
        looks: whether input that is not finite is refused. On a device it is not looked at, since the host would wait:
            it shows in the sum.
    """

    name: str
    looks: bool = True

    # ---- dense codes: a code for every coordinate

    @abstractmethod
    def norms(self, rows_W: Sequence[Tensor], layout: Layout, kind: str) -> Tensor:
        """A number of every block of a layout, float64 [W, M]; not finite where a coordinate is not.

        Args:
            rows_W: rows [W, N] of each tensor.
            layout: whose blocks.
            kind: `l1`, `l2`, `linf`; `sum` of coordinates, `below`: of the negative ones, `count`: how many these are.
        """

    @abstractmethod
    def write(self, message: Message, name: str, numbers_S: Tensor) -> None:
        """Write numbers of blocks, float32 [S, M], into a field of messages of one layout."""

    @abstractmethod
    def read(self, message: Message, name: str) -> Tensor:
        """Read a field that has a float32 for every block: [S, M]."""

    @abstractmethod
    def encode(
        self, bucket: Bucket, message: Message, coding: Coding, factors_W: Tensor | None, scales_W: Tensor | None
    ) -> None:
        """Write the fields `codes` and `signs`.

        Args:
            bucket: coordinates.
            message: of the local workers.
            coding: how.
            factors_W: what the coordinates of each block are multiplied by, float32 [W or 1, M]; None = 1.
            scales_W: written into the field `scales`, float32 [W, M]; None = there is none, or it is written.

        Raises:
            NonFiniteRow: row w T + t is worker w's part of tensor t; where the engine looks.
        """

    @abstractmethod
    def add_codes(
        self, target: Target, message: Message, coding: Coding, shared: Tensor | None, middles: Tensor | None
    ) -> None:
        """Add what codes stand for; each product and each sum is rounded once.

        Args:
            target: where, with alpha and divisor.
            message: of all senders; scales are read from its field `header_of` the coding.
            coding: how.
            shared: scales of whole tensors, float32 [T], where messages have none.
            middles: added to the scaled values, float32 [S, M], times alpha already; None = nothing.
        """

    def encode_dense(self, bucket: Bucket, message: Message, coding: Coding, shared: Tensor | None = None) -> None:
        """Scales and codes of all coordinates of a bucket.

        Args:
            bucket: coordinates.
            message: of the local workers, with the fields of `Dense.layout`.
            coding: how.
            shared: scales of whole tensors that every worker knows, float32 [T], where messages have none.

        Raises:
            NonFiniteRow: as `encode`.
        """
        layout, rows_W = message.layout, bucket.rows_W
        if coding.norm == "means":
            total, below, count = (self.norms(rows_W, layout, kind) for kind in ("sum", "below", "count"))
            means = middle_and_half(total, below, count, entries_on(layout, total.device))
            for name, numbers_W in zip(("middles", "halves"), means, strict=True):
                self._refuse(layout, numbers_W)
                self.write(message, name, numbers_W)
            self.encode(bucket, message, coding, None, None)
            return
        scales_W = None
        if coding.norm:
            norms_W = self.norms(rows_W, layout, coding.norm)
            scales_W = coding.scales(norms_W, entries_on(layout, norms_W.device))
            self._refuse(layout, scales_W)
        known = scales_W if shared is None else shared[None]
        self.encode(bucket, message, coding, coding.factors(known), scales_W)

    def add_dense(self, target: Target, message: Message, coding: Coding, shared: Tensor | None = None) -> None:
        """Add scale x value of code of every sender; arguments as for `encode_dense` and `add_codes`."""
        middles = self.read(message, "middles") * target.alpha if coding.norm == "means" else None
        self.add_codes(target, message, coding, shared, middles)

    def _refuse(self, layout: Layout, numbers_W: Tensor) -> None:
        """Raise NonFiniteRow where a number of a block [W, M] is not finite."""
        if self.looks and not numbers_W.isfinite().all():
            w, block = (~numbers_W.isfinite()).nonzero()[0].tolist()
            counts = -(-layout.numels // layout.blocks)
            tensor = int(np.searchsorted(counts.cumsum(), block, side="right"))
            raise NonFiniteRow(w * len(counts) + tensor)


def header_of(coding: Coding) -> str:
    """The field by whose numbers values are multiplied."""
    return "halves" if coding.norm == "means" else "scales"


@functools.lru_cache(maxsize=KEPT)
def entries_on(layout: Layout, device: torch.device) -> Tensor:
    """Coordinates of every block of a layout, float64 [M], on a device."""
    return table(torch.from_numpy(layout.entries), device)
