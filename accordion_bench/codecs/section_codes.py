"""Index codes of many tensors at once, on a device: as many launches for a bucket as for one tensor.

Sections are tensors side by side in a row of coordinates [T]; what is kept of them are positions in it, ascending. The
bits of each section are those of `index_codes`, and as many; low bits of all sections stand first, the rest after them.

Tensor suffixes: R rows that are cut alike, K kept entries of a row, S sections, B bytes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from accordion_bench.codecs import index_codes
from accordion_bench.tensors.upload import table, upload

WIDE = 25  # low bits of an index that fit into four bytes, wherever in a byte they begin


class SectionCodes:
    """The codes of rows in which every section keeps a known number of entries.

    Args:
        layout: which sections, and how many entries of each.
        device: where rows are.
        remembered: whether they are used again and again; then the host waits for their upload, once.

    Attributes:
        kept: entries kept of each message.
        nbytes: bytes of the codes of each message.
    """

    def __init__(self, layout: "SectionLayout", device: torch.device, remembered: bool = False) -> None:
        self.layout, self.kept, self.nbytes, self.device = layout, layout.kept, layout.nbytes, device
        self._up = table if remembered else upload
        self.tables: Tensor | None = None  # uploaded where they are needed

    def encode(self, positions_R: Tensor) -> Tensor:
        """Ascending positions [R, K] as bytes [R, B], one message after the other."""
        layout, rows = self.layout, positions_R.shape[0]
        start, by_rank, low, _, at_unary, at_low, _, ranks = self._per_entry()
        index_R = positions_R - start
        # one byte more: where bits go that an index does not have
        bits_R = torch.zeros(rows, (layout.total + 1) * 8, dtype=torch.bool, device=self.device)
        bits_R.scatter_(1, (index_R >> low).add_(at_unary).addcmul_(by_rank, ranks), True)
        if layout.most_low:
            each = torch.arange(layout.most_low, device=self.device)
            place = torch.addcmul(at_low, low, ranks)[:, None] + each
            place = torch.where(each < low[:, None], place, layout.total * 8).flatten()
            lows_R = ((index_R[:, :, None] >> each) & 1).bool()
            bits_R.scatter_(1, place.expand(rows, -1), lows_R.flatten(1))
        return pack_bytes(bits_R)[:, : layout.total]

    def decode(self, codes_R: Tensor) -> Tensor:
        """The inverse of `encode`: positions [R, K]."""
        layout, rows = self.layout, codes_R.shape[0]
        start, by_rank, low, mask, _, at_low, at_unary, ranks = self._per_entry()
        unary_R = torch.cat([codes_R[:, first:stop] for first, stop in layout.unary], dim=1)
        ones = torch.nonzero_static(unpack_bytes(unary_R), size=rows * len(ranks))[:, 1]
        high_R = ones.view(rows, -1) - torch.addcmul(at_unary, by_rank, ranks)
        positions_R = (high_R << low).add_(start)
        if layout.most_low:
            width, integer = (4, torch.int32) if layout.most_low <= WIDE else (8, torch.int64)
            bit = torch.addcmul(at_low, low, ranks)
            place = (bit >> 3)[:, None] + torch.arange(width, device=self.device)
            padded_R = torch.nn.functional.pad(codes_R, (0, width))
            words_R = padded_R.index_select(1, place.flatten()).view(integer)
            positions_R.add_((words_R >> (bit & 7)) & mask)
        return positions_R

    def _per_entry(self) -> tuple[Tensor, ...]:
        """The columns of the layout for each entry, and its number."""
        if self.tables is None:
            self.tables = self._up(self.layout.tables, self.device)
        ranks = torch.arange(sum(self.kept), device=self.device)
        section = torch.searchsorted(self.tables[0], ranks, right=True)
        return (*self.tables[1:].index_select(1, section).unbind(0), ranks)


class SectionLayout:
    """Where the bits of the sections are, all numbers of the host.

    Args:
        starts: where the sections begin in the row of coordinates; several messages name them again and again.
        sizes: n, entries of each section.
        counts: k, entries kept of each section.
        per_message: sections of one message; a row of several messages has their codes one after the other.

    Attributes:
        kept, nbytes: entries and bytes of the codes of each message.
        total: bytes of all messages.
        unary: where the high bits of each message are, in bytes.
        most_low: largest number of low bits.
        tables: [8, S]: last entry + 1, start, whether a bit for each entry before it lies in between, low bits and a
            mask of them, first high bit, first low bit, first high bit where the high bits of all messages are side by
            side; the last three as they would be for entry 0 of the row.
    """

    def __init__(self, starts: Sequence[int], sizes: Sequence[int], counts: Sequence[int], per_message: int) -> None:
        n, k = np.array(sizes, np.int64), np.array(counts, np.int64)
        by_rank, low, low_bytes, unary_bytes = index_codes.code_shapes(n, k)
        lows, unaries = (size.reshape(-1, per_message) for size in (low_bytes, unary_bytes))
        message = (lows.sum(1) + unaries.sum(1)).cumsum()
        first = message - lows.sum(1) - unaries.sum(1)
        at_low = first[:, None] + lows.cumsum(1) - lows
        at_unary = (first + lows.sum(1))[:, None] + unaries.cumsum(1) - unaries
        apart = unary_bytes.cumsum() - unary_bytes
        before = k.cumsum() - k
        self.kept = k.reshape(-1, per_message).sum(1).tolist()
        self.nbytes = (message - first).tolist()
        self.total = int(message[-1])
        self.unary = list(zip((first + lows.sum(1)).tolist(), message.tolist(), strict=True))
        self.most_low = int(low.max())
        columns = [
            k.cumsum(),
            np.array(starts, np.int64),
            by_rank,
            low,
            (1 << low) - 1,
            8 * at_unary.reshape(-1) - by_rank * before,
            8 * at_low.reshape(-1) - low * before,
            8 * apart - by_rank * before,
        ]
        self.tables = torch.from_numpy(np.stack(columns))


def pack_bytes(bits_R: Tensor) -> Tensor:
    """Booleans [R, 8 B] as bytes [R, B], as `index_codes.pack_bits` does."""
    weights = torch.arange(8, dtype=torch.uint8, device=bits_R.device)
    return (bits_R.view(torch.uint8).unflatten(1, (-1, 8)) << weights).sum(-1, dtype=torch.uint8)


def unpack_bytes(bytes_R: Tensor) -> Tensor:
    """Bytes [R, B] as numbers [R, 8 B]: 0, or what the bit counts in its byte."""
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=bytes_R.device)
    return (bytes_R[:, :, None] & weights).flatten(1)
