"""Layout: fields of a message and their offsets, from which sizes and positions of all bytes follow.

Tensor suffixes: S senders, T tensors, M blocks of all tensors, B bytes.
"""

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from accordion_bench.codecs.packed_codes import code_shapes

KEPT = 256  # cached layouts of each kind: one for each bucket, level and method of a run


class Field(NamedTuple):
    """One field of a message.

    dtype: dtype of the elements.
    counts: number of elements for each tensor [T].
    offsets: first byte in the message for each tensor [T].
    """

    dtype: torch.dtype
    counts: np.ndarray
    offsets: np.ndarray

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First byte and end of the field, for each tensor."""
        ends = self.offsets + self.counts * self.dtype.itemsize
        return list(zip(self.offsets.tolist(), ends.tolist(), strict=True))


class Layout:
    """Fields of one sender's message, ordered by tensor and then by field, without gaps.

    Layouts are compared by identity and are keys of cached tables, so create them in cached functions.

    Args:
        numels: number of coordinates of each tensor [T].
        blocks: number of coordinates that share one element of a field such as `scales` [T], at least 1.
        fields: (dtype, element counts [T]) by name, in order. If counts depend on the data, each sender has its own
            layout, and a layout with the largest counts is the upper bound.

    Attributes:
        fields: fields by name.
        sizes: bytes of each tensor [T].
        nbytes: length of the message in bytes.
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
        """Return the fields of some tensors, at their offsets in the whole message; cached."""
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
        """Keep the entries of some tensors in the attributes of a subclass."""

    @functools.cached_property
    def starts(self) -> list[int]:
        """First byte of each tensor in the message."""
        first = next(iter(self.fields.values()))
        return first.offsets.tolist()

    @property
    def counts(self) -> np.ndarray:
        """Number of blocks of each tensor [T]."""
        return -(-self.numels // self.blocks)

    @functools.cached_property
    def entries(self) -> np.ndarray:
        """Number of coordinates of each block, float64 [M]."""
        counts = self.counts
        entries = np.repeat(self.blocks, counts).astype(np.float64)
        filled = counts > 0
        entries[(counts.cumsum() - 1)[filled]] = (self.numels - (counts - 1) * self.blocks)[filled]
        return entries


class SparseLayout(Layout):
    """Layout of sparse messages: numbers of the selected entries, then indices in the smaller code of `index_codes`.

    Args:
        numels: number of coordinates of each tensor [T].
        kept: number of entries of each tensor [T].
        signs: whether an entry is one scale with a sign. Then the fields are `scales`, one float32 per tensor,
            `counts`, one int32 per tensor, and `indices` of 2 i + (x_i > 0) below 2 n. Otherwise the fields are
            `values`, float32, and `indices`.

    Attributes:
        kept: int64 [T].
        codes: shapes of the index codes of each tensor, see `index_codes.code_shapes`.
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
        """Whether an entry is one scale with a sign."""
        return "scales" in self.fields


class Transfer(NamedTuple):
    """One collective of an exchange and the size of its message.

    collective: `all_reduce`; `all_gather`; `all_to_all`: each worker receives its shard of the bytes;
        `all_gather_shards`: each worker gathers the shards of all; `send_receive`: point to point, mean over workers.
    nbytes: size of the message in bytes.
    """

    collective: str
    nbytes: float

    def payload(self, workers: int) -> float:
        """Mean number of bytes that one worker passes to the collective."""
        return self.nbytes / workers if self.collective == "all_gather_shards" else self.nbytes

    def wire(self, workers: int) -> float:
        """Number of bytes sent over the links of all workers; exact for whole numbers of bytes."""
        others = workers - 1
        per_byte = {"all_reduce": 2 * others, "all_gather": workers * others, "send_receive": workers}
        return per_byte.get(self.collective, others) * self.nbytes


class Message(NamedTuple):
    """Messages of several senders with their layouts.

    rows: bytes [S, B] if all senders share one layout, else one tensor [B] per sender.
    layouts: layout of each sender; the same object if all share one.
    coming: layouts of the gathered messages of all workers, if these depend on the data.
    """

    rows: Any
    layouts: Sequence[Any]
    coming: Sequence[Any] = ()

    @classmethod
    def empty(cls, layout: Layout, senders: int, device: torch.device) -> "Message":
        """Return uninitialised messages of one layout."""
        rows = torch.empty(senders, layout.nbytes, dtype=torch.uint8, device=device)
        return cls(rows, [layout] * senders)

    @classmethod
    def of_each(cls, layouts: Sequence[Layout], device: torch.device) -> "Message":
        """Return uninitialised messages, one per layout."""
        sizes = [layout.nbytes for layout in layouts]
        return cls(torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(sizes), layouts)

    @property
    def layout(self) -> Any:
        """Layout of the first sender; that of all senders if they share one."""
        return self.layouts[0]

    def ones(self, field: str) -> "Message":
        """Return a copy of messages of one layout, with every element of a field set to 1."""
        rows, own = self.rows.clone(), self.layout.fields[field]
        for count, offset in zip(own.counts.tolist(), own.offsets.tolist(), strict=True):
            ones = torch.ones(count, dtype=own.dtype, device=rows.device).view(torch.uint8)
            rows[:, offset : offset + len(ones)] = ones
        return self._replace(rows=rows)

    def take(self, which: Sequence[int]) -> "Message":
        """Return the same bytes with the fields of some tensors only."""
        own = {id(layout): layout.take(which) for layout in self.layouts}
        return self._replace(layouts=[own[id(layout)] for layout in self.layouts])


@functools.lru_cache(maxsize=KEPT)
def whole_layout(numels: tuple[int, ...]) -> Layout:
    """Return the layout of tensors of one block each, without fields; cached."""
    return Layout(numels, [max(1, n) for n in numels], {})


@functools.lru_cache(maxsize=4 * KEPT)
def sparse_layout(numels: tuple[int, ...], kept: tuple[int, ...]) -> SparseLayout:
    """Return the layout of `kept` entries of each tensor with their values; cached, for fixed counts."""
    return SparseLayout(numels, kept)


@functools.lru_cache(maxsize=KEPT)
def bytes_layout(numels: tuple[int, ...], sizes: tuple[int, ...]) -> Layout:
    """Return the layout of one field of bytes; cached."""
    return Layout(numels, [max(1, n) for n in numels], {"bytes": (torch.uint8, sizes)})


def in_blocks(x_R: Tensor, size: int) -> Tensor:
    """Return rows [R, N] as blocks [R, m, size], padded with zeros."""
    return pad(x_R, (0, -x_R.shape[1] % size)).unflatten(1, (-1, size))


def per_tensor(numbers: Tensor | None, layout: Layout) -> list[Any]:
    """Split numbers of all blocks [S, M] by tensor, [S, m] each; a list of None for None."""
    counts = layout.counts.tolist()
    return [None] * len(counts) if numbers is None else list(numbers.split(counts, dim=1))
