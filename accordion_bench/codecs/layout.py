"""Layout: the fields of a message. Bytes are their sum, and engines are told by it where to read and write.

Tensor suffixes: S senders, T tensors, M blocks of all tensors, B bytes.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from accordion_bench.codecs.index_codes import code_shapes

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

    def __init__(self, numels: Any, blocks: Any, fields: Mapping[str, tuple[torch.dtype, Any]]) -> None:
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
            own._keep(ids)
            self._parts[key] = own
        return self._parts[key]

    def _keep(self, ids: list[int]) -> None:
        """Of what a subclass says of each tensor, keep that of some."""

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


class SparseLayout(Layout):
    """Some entries of each tensor: their numbers, then their indices in the smaller code of `index_codes`.

    Args:
        numels: coordinates of each tensor [T].
        kept: entries of each tensor [T].
        signs: whether entries are told by their signs: fields `scales`, a float32 for the tensor, `counts`, an int32,
            and `indices`, of 2 i + (x_i > 0) below 2 n. Else fields `values`, float32, and `indices`.

    Attributes:
        kept: int64 [T].
        codes: what the index codes of each tensor consist of, see `index_codes.code_shapes`.
    """

    def __init__(self, numels: Sequence[int], kept: Sequence[int], signs: bool = False) -> None:
        n, self.kept = np.array(numels, np.int64), np.array(kept, np.int64)
        self.codes = code_shapes(n * (2 if signs else 1), self.kept)
        _, _, low_bytes, high_bytes = self.codes
        ones = np.ones_like(n)
        numbers = {"scales": (torch.float32, ones), "counts": (torch.int32, ones)}
        if not signs:
            numbers = {"values": (torch.float32, self.kept)}
        super().__init__(n, np.maximum(n, 1), numbers | {"indices": (torch.uint8, low_bytes + high_bytes)})

    def _keep(self, ids: list[int]) -> None:
        by_rank, low, low_bytes, high_bytes = self.codes
        self.kept, self.codes = self.kept[ids], (by_rank[ids], low[ids], low_bytes[ids], high_bytes[ids])

    @property
    def signs(self) -> bool:
        """Whether entries are told by their signs."""
        return "scales" in self.fields


class Transfer(NamedTuple):
    """One collective of an exchange, and the bytes of a message in it.

    collective: `all_reduce`; `all_gather`; `all_to_all`: to every worker its share of the bytes; `all_gather_shards`:
        every worker gathers the shares of all; `send_receive`: from worker to worker, a mean over them.
    nbytes: of the message.
    """

    collective: str
    nbytes: float

    def payload(self, workers: int) -> float:
        """Bytes that one worker hands over, in the mean."""
        return self.nbytes / workers if self.collective == "all_gather_shards" else self.nbytes

    def wire(self, workers: int) -> float:
        """Bytes that the links of all workers send; exact for whole numbers of bytes."""
        others = workers - 1
        per_byte = {"all_reduce": 2 * others, "all_gather": workers * others, "send_receive": workers}
        return per_byte.get(self.collective, others) * self.nbytes


class Message(NamedTuple):
    """The bytes of several senders, and where their fields are.

    rows: bytes [S, B] where all senders have one layout, else [B] of each.
    layouts: of each sender; the same object where all have one.
    coming: layouts of all workers' messages of the tensors that are gathered, where these depend on the data.
    """

    rows: Any
    layouts: Sequence[Any]
    coming: Sequence[Any] = ()

    @classmethod
    def empty(cls, layout: Layout, senders: int, device: torch.device) -> "Message":
        """Uninitialised messages of one layout."""
        rows = torch.empty(senders, layout.nbytes, dtype=torch.uint8, device=device)
        return cls(rows, [layout] * senders)

    @classmethod
    def of_each(cls, layouts: Sequence[Layout], device: torch.device) -> "Message":
        """Uninitialised messages, each of a layout of its own."""
        sizes = [layout.nbytes for layout in layouts]
        return cls(torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(sizes), layouts)

    @property
    def layout(self) -> Any:
        """The layout of all senders."""
        return self.layouts[0]

    def ones(self, field: str) -> "Message":
        """The same messages of one layout, with 1 in the place of every number of a field."""
        rows, own = self.rows.clone(), self.layout.fields[field]
        for count, offset in zip(own.counts.tolist(), own.offsets.tolist(), strict=True):
            ones = torch.ones(count, dtype=own.dtype, device=rows.device).view(torch.uint8)
            rows[:, offset : offset + len(ones)] = ones
        return self._replace(rows=rows)

    def take(self, which: Sequence[int]) -> "Message":
        """The same bytes, with the fields of some tensors alone."""
        own = {id(layout): layout.take(which) for layout in self.layouts}
        return self._replace(layouts=[own[id(layout)] for layout in self.layouts])


@functools.lru_cache(maxsize=KEPT)
def whole_layout(numels: tuple[int, ...]) -> Layout:
    """Of tensors that are one block each, without a message."""
    return Layout(numels, [max(1, n) for n in numels], {})


@functools.lru_cache(maxsize=4 * KEPT)
def sparse_layout(numels: tuple[int, ...], kept: tuple[int, ...]) -> SparseLayout:
    """So many entries of each tensor, with their values; remembered, for counts that do not depend on the data."""
    return SparseLayout(numels, kept)


@functools.lru_cache(maxsize=KEPT)
def bytes_layout(numels: tuple[int, ...], sizes: tuple[int, ...]) -> Layout:
    """One field of bytes of each tensor."""
    return Layout(numels, [max(1, n) for n in numels], {"bytes": (torch.uint8, sizes)})
