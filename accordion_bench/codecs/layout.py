"""Layout: the fields of a message. Bytes are their sum, and engines are told by it where to read and write.

Tensor suffixes: S senders, T tensors, M blocks of all tensors, B bytes.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

KEPT = 256  # layouts remembered, of each kind: of each bucket of a run, for each level and method


class Field(NamedTuple):
    """One field of a message, of each tensor.

    dtype: of its elements.
    counts: how many there are [T].
    offsets: the byte of the message at which it begins [T].
    """

    dtype: torch.dtype
    counts: np.ndarray
    offsets: np.ndarray

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First byte and end of the field of each tensor."""
        ends = self.offsets + self.counts * self.dtype.itemsize
        return list(zip(self.offsets.tolist(), ends.tolist(), strict=True))


class Layout:
    """The fields of one sender's message: tensor by tensor, of each one field by field, without gaps.

    Layouts are compared by identity: make them by a function that remembers them, since tables of kernels are kept for
    each of them.

    Args:
        numels: coordinates of each tensor [T].
        blocks: coordinates that share one number of a field such as `scales` [T], at least 1.
        fields: by name and in order, (type, element counts [T]). Where counts depend on the data, every sender has a
            layout of its own, and the one with the largest counts is the bound.

    Attributes:
        fields: where each is, by name.
        sizes: bytes of each tensor's part [T].
        nbytes: length of the message, the sum of its fields.
    """

    def __init__(
        self, numels: Sequence[int], blocks: Sequence[int], fields: Mapping[str, tuple[torch.dtype, Sequence[int]]]
    ) -> None:
        self.numels, self.blocks = np.array(numels, np.int64), np.array(blocks, np.int64)
        widths = np.zeros((len(self.numels), len(fields)), np.int64)
        for column, (dtype, counts) in enumerate(fields.values()):
            widths[:, column] = np.asarray(counts, np.int64) * dtype.itemsize
        offsets = (widths.ravel().cumsum() - widths.ravel()).reshape(widths.shape)
        self.fields = {
            name: Field(dtype, np.asarray(counts, np.int64), at)
            for (name, (dtype, counts)), at in zip(fields.items(), offsets.T, strict=True)
        }
        self.sizes, self.nbytes = widths.sum(1), int(widths.sum())
        self._parts: dict[tuple[int, ...], Layout] = {}

    def take(self, which: Sequence[int]) -> "Layout":
        """The fields of some tensors, at their offsets in the whole message; remembered."""
        if len(which) == len(self.numels):
            return self
        key = tuple(which)
        if key not in self._parts:
            own, ids = copy.copy(self), list(key)
            own.numels, own.blocks, own.sizes = (column[ids] for column in (self.numels, self.blocks, self.sizes))
            own.fields = {
                name: Field(field.dtype, field.counts[ids], field.offsets[ids]) for name, field in self.fields.items()
            }
            own.nbytes, own._parts = int(own.sizes.sum()), {}
            for name in ("starts", "entries"):
                own.__dict__.pop(name, None)
            self._parts[key] = own
        return self._parts[key]

    @functools.cached_property
    def starts(self) -> list[int]:
        """The byte at which the part of each tensor begins."""
        first = next(iter(self.fields.values()))
        return first.offsets.tolist()

    @functools.cached_property
    def entries(self) -> np.ndarray:
        """Coordinates of every block, float64 [M]."""
        counts = -(-self.numels // self.blocks)
        entries = np.repeat(self.blocks, counts).astype(np.float64)
        filled = counts > 0
        entries[(counts.cumsum() - 1)[filled]] = (self.numels - (counts - 1) * self.blocks)[filled]
        return entries


class Message(NamedTuple):
    """The bytes of several senders, and where their fields are.

    rows: bytes [S, B] where all senders have one layout, else [B] of each.
    layouts: of each sender; the same object where all have one.
    """

    rows: Any
    layouts: Sequence[Layout]

    @classmethod
    def empty(cls, layout: Layout, senders: int, device: torch.device) -> "Message":
        """Uninitialised messages of one layout."""
        rows = torch.empty(senders, layout.nbytes, dtype=torch.uint8, device=device)
        return cls(rows, [layout] * senders)

    @property
    def layout(self) -> Layout:
        """The layout of all senders."""
        return self.layouts[0]

    def take(self, which: Sequence[int]) -> "Message":
        """The same bytes, with the fields of some tensors alone."""
        own = {id(layout): layout.take(which) for layout in self.layouts}
        return Message(self.rows, [own[id(layout)] for layout in self.layouts])


@functools.lru_cache(maxsize=KEPT)
def whole_layout(numels: tuple[int, ...]) -> Layout:
    """Of tensors that are one block each, without a message."""
    return Layout(numels, [max(1, n) for n in numels], {})


@functools.lru_cache(maxsize=KEPT)
def bytes_layout(numels: tuple[int, ...], sizes: tuple[int, ...]) -> Layout:
    """One field of bytes of each tensor."""
    return Layout(numels, [max(1, n) for n in numels], {"bytes": (torch.uint8, sizes)})
