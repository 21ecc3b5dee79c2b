"""The engine of a device in torch: sparse codes of all tensors of a bucket at once, in launches that do not grow.

Tensors stand side by side in a row [T] for each worker, those of equal size and count next to each other; what is
selected are positions in it. A message is cut tensor by tensor, as everywhere. The host waits nowhere.

Tensor suffixes: W local workers, R rows, S senders, T coordinates of all tensors, K entries.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Bucket, Target
from accordion_bench.codecs.device_selection import (
    Part,
    WantedEntries,
    about,
    above,
    chosen,
    in_order,
    listed,
    top_positions,
)
from accordion_bench.codecs.engine import Sampling, Selection
from accordion_bench.codecs.layout import KEPT, Message, SparseLayout
from accordion_bench.codecs.orthonormal import unit_columns_together
from accordion_bench.codecs.reference import Reference
from accordion_bench.codecs.section_codes import SectionCodes, SectionLayout
from accordion_bench.tensors.permutations import draws_of, positions_in_row, words_of
from accordion_bench.tensors.same_shape import in_rows
from accordion_bench.tensors.upload import fresh, upload

HEADER = 8  # bytes of scale and count before entries that are told by their signs


class DeviceRow:
    """Tensors [W, N] side by side, those that are treated alike next to each other.

    Args:
        rows_W: the tensors.
        alike: what tensors of equal size must have in common to stand next to each other.

    Attributes:
        x_W: their coordinates [W, T]; a copy.
        order: their numbers, as they stand.
        sizes, starts: of each, as they stand.
    """

    def __init__(self, rows_W: Sequence[Tensor], alike: Sequence[Any]) -> None:
        groups: dict[tuple[int, Any], list[int]] = {}
        for t, (x_W, what) in enumerate(zip(rows_W, alike, strict=True)):
            groups.setdefault((x_W.shape[1], what), []).append(t)
        self.groups = list(groups.values())
        self.order = [t for group in self.groups for t in group]
        self.sizes = [rows_W[t].shape[1] for t in self.order]
        self.starts = list(itertools.accumulate(self.sizes, initial=0))[:-1]
        self.x_W = torch.cat([rows_W[t] for t in self.order], dim=1)

    def parts(self, kept: Sequence[int]) -> list[Part]:
        """Groups of tensors, and how many entries of each are wanted; `kept` by the tensor's number."""
        parts, first = [], 0
        for group in self.groups:
            parts.append(Part(self.starts[first], len(group), self.sizes[first], kept[group[0]]))
            first += len(group)
        return parts


class Places:
    """A selection as positions in a row.

    Args:
        row: coordinates.
        positions_W: ascending [W, L], anything may stand behind what is selected; None = all that are not zero.
        counts_W: entries of each tensor as they stand [W, tensors]; None = they are known to who has asked.
    """

    def __init__(self, row: DeviceRow, positions_W: Tensor | None, counts_W: Tensor | None) -> None:
        self.row, self.positions_W, self._counts_W = row, positions_W, counts_W

    @property
    def counts_W(self) -> Tensor:
        """Entries of each tensor, int32 [W, tensors], by its number."""
        assert self._counts_W is not None
        back = sorted(range(len(self.row.order)), key=lambda place: self.row.order[place])
        columns = self._counts_W.int().unbind(1)
        return torch.stack([columns[place] for place in back], dim=1)

    def entries(self, kept: Sequence[int]) -> Tensor:
        """Positions of all workers one after the other, in a row [W T]; `kept` of each worker."""
        total = self.row.x_W.shape[1]
        if self.positions_W is None:
            return torch.nonzero_static(self.row.x_W.flatten(), size=sum(kept))[:, 0]
        if all(k == self.positions_W.shape[1] for k in kept):
            own_W = self.positions_W
            offsets = total * torch.arange(len(own_W), device=own_W.device)
            return (own_W + offsets[:, None]).flatten()
        pairs = enumerate(zip(self.positions_W, kept, strict=True))
        return torch.cat([own[:k] + w * total for w, (own, k) in pairs])


class OnDevice(Reference):
    """Plain torch on a device, sparse codes of all tensors at once."""

    looks, copies, fills = False, True, True

    def largest(self, rows_W: Sequence[Tensor], counts: Sequence[int]) -> Selection:
        row = DeviceRow(rows_W, counts)
        return Places(row, top_positions(row.x_W, row.parts(counts)), None)

    def above(self, rows_W: Sequence[Tensor], threshold: float, most: Sequence[int]) -> Selection:
        return self._sampled(rows_W, [above(threshold, k) for k in most])

    def about(self, rows_W: Sequence[Tensor], counts: Sequence[int], sampling: Sampling) -> Selection:
        pairs = zip(rows_W, counts, strict=True)
        return self._sampled(rows_W, [about(x_W.shape[1], k, *sampling) for x_W, k in pairs])

    def _sampled(self, rows_W: Sequence[Tensor], wanted: Sequence[WantedEntries]) -> Places:
        row = DeviceRow(rows_W, wanted)
        enough = [listed(x_W.shape[1], some) for x_W, some in zip(rows_W, wanted, strict=True)]
        counts_W, positions_W = chosen(row.x_W, row.parts(enough), [wanted[t] for t in row.order], self.in_order)
        return Places(row, positions_W, counts_W)

    def in_order(self, x_W: Tensor, parts: Sequence[Part]) -> Tensor:
        """See `device_selection.in_order`."""
        return in_order(x_W, parts)

    def nonzero(self, rows_W: Sequence[Tensor]) -> Selection:
        row = DeviceRow(rows_W, [None] * len(rows_W))
        ends = upload(torch.tensor(row.starts), row.x_W.device) + upload(torch.tensor(row.sizes), row.x_W.device)
        until_W = torch.nn.functional.pad((row.x_W != 0).cumsum(1, dtype=torch.int32), (1, 0)).index_select(1, ends)
        return Places(row, None, torch.diff(until_W, dim=1, prepend=until_W.new_zeros(len(until_W), 1)))

    def encode_sparse(self, bucket: Bucket, selection: Selection, message: Message) -> None:
        assert isinstance(selection, Places)
        row, layouts, signs = selection.row, message.layouts, message.layout.signs
        sections = sections_of(message, row.order, row.x_W.device)
        positions = selection.entries([int(layout.kept.sum()) for layout in layouts])
        values = row.x_W.flatten().index_select(0, positions).float()
        places = positions % row.x_W.shape[1] if len(layouts) > 1 else positions
        codes = sections.encode((2 * places + (values > 0) if signs else places)[None])[0].split(sections.nbytes)
        if signs:
            scales_W = self.largest_of(bucket)
            numbers_W = torch.stack([scales_W.view(torch.int32), selection.counts_W], dim=2)
            heads = dict(enumerate(numbers_W.view(torch.uint8).view(-1, HEADER).unbind(0)))
            of = [w * len(row.order) + t for w in range(len(layouts)) for t in row.order]
        else:
            kept = [int(layout.kept[t]) for layout in layouts for t in row.order]
            heads = dict(enumerate(values.view(torch.uint8).split([4 * k for k in kept])))
            of = list(range(len(kept)))
        place_of = {t: place for place, t in enumerate(row.order)}
        pieces = []
        for w in range(len(layouts)):
            for t in range(len(row.order)):
                at = w * len(row.order) + place_of[t]
                pieces += [heads[of[at]], codes[at]]
        whole = torch.cat(pieces)
        if isinstance(message.rows, Tensor):
            message.rows.copy_(whole.view(message.rows.shape))
        else:
            torch._foreach_copy_(list(message.rows), list(whole.split([layout.nbytes for layout in layouts])))

    def add_sparse(self, target: Target, message: Message) -> None:
        target, layouts = target.begun(), message.layouts
        rows_R = target.rows_R
        sizes, rows, device = [x_R.shape[1] for x_R in rows_R], len(rows_R[0]), rows_R[0].device
        alone = isinstance(message.rows, Tensor)  # one layout: senders are rows that are cut alike
        cut = layouts[:1] if alone else layouts
        sections = sections_of(message._replace(layouts=cut), range(len(sizes)), device)
        heads, tails = [], []
        for sender, layout in enumerate(cut):
            own_S = message.rows if alone else message.rows[sender][None]
            first = layout.fields["scales" if layout.signs else "values"].offsets.tolist()
            for start, (middle, stop) in zip(first, layout.fields["indices"].spans, strict=True):
                heads.append(own_S[:, start:middle])
                tails.append(own_S[:, middle:stop])
        numbers_S, positions_S = torch.cat(heads, dim=1), sections.decode(torch.cat(tails, dim=1))
        if message.layout.signs:
            scales = numbers_S.view(-1, HEADER)[:, :4].contiguous().view(torch.float32)[:, 0]
            ends = upload(torch.tensor([k for layout in cut for k in layout.kept.tolist()]).cumsum(0), device)
            entry = torch.arange(positions_S.shape[1], device=device)
            values_S = ((2 * (positions_S & 1) - 1) * scales[torch.searchsorted(ends, entry, right=True)]).float()
            positions_S = positions_S >> 1
        else:
            values_S = numbers_S.flatten().view(torch.float32).view(len(numbers_S), positions_S.shape[1])
        total_R = torch.zeros(rows, sum(sizes), dtype=rows_R[0].dtype, device=device)
        kept = [int(layout.kept.sum()) for layout in layouts]
        pairs = zip(positions_S.flatten().split(kept), values_S.flatten().split(kept), strict=True)
        for sender, (positions, values) in enumerate(pairs):
            # one launch for each sender, so that the order of summation is theirs: in any order, processes would differ
            total_R[sender % rows].scatter_add_(0, positions, values.to(total_R.dtype))
        torch._foreach_add_(list(rows_R), list(total_R.split(sizes, dim=1)), alpha=target.alpha)
        if target.divisor != 1:
            torch._foreach_div_(list(rows_R), target.divisor)

    def places(
        self, keys: Callable[[Bucket], Sequence[int]], counts: Sequence[int], bucket: Bucket, device: torch.device
    ) -> Any:
        words = fresh(lambda moment: words_of(keys(bucket.at(moment))), bucket, device)
        return positions_in_row(draws_of(bucket.numels, tuple(counts)), words), list(counts)

    def take(self, rows_W: Sequence[Tensor], places: Any) -> list[Tensor]:
        positions, counts = places
        return list(torch.cat(list(rows_W), dim=1).index_select(1, positions).split(counts, dim=1))

    def put(self, target: Target, values_R: Sequence[Tensor], places: Any, factors: Sequence[float]) -> None:
        target = target.begun()
        (positions, counts), sizes = places, [row_R.shape[1] for row_R in target.rows_R]
        scaled_R = torch.cat(list(values_R), dim=1)
        if any(factor != 1 for factor in factors):
            torch._foreach_mul_(list(scaled_R.split(counts, dim=1)), list(factors))
        total_R = scaled_R.new_zeros(len(scaled_R), sum(sizes)).index_copy_(1, positions, scaled_R)
        torch._foreach_add_(list(target.rows_R), list(total_R.split(sizes, dim=1)), alpha=target.alpha)

    def orthonormalise(self, factors: Sequence[Tensor], passes: int = 2) -> list[Tensor]:
        return unit_columns_together(factors, passes) if factors else []

    def lifted(
        self, grown_W: Sequence[Tensor], news_W: Sequence[Tensor], sizes: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        return lifted_together(grown_W, news_W, sizes)


def sections_of(message: Message, order: Sequence[int], device: torch.device) -> SectionCodes:
    """Index codes of tensors that stand in this order, of several messages one after the other, each tensor by itself.

    Remembered where messages are the rows of one tensor: then counts do not depend on the data.
    """
    layouts = message.layouts
    if isinstance(message.rows, Tensor):
        return _sections_alike(layouts[0], len(layouts), tuple(order), device)
    return _sections(layouts, order, device)


@functools.lru_cache(maxsize=KEPT)
def _sections_alike(layout: SparseLayout, times: int, order: tuple[int, ...], device: torch.device) -> SectionCodes:
    return _sections((layout,) * times, order, device, kept=True)


def _sections(
    layouts: Sequence[SparseLayout], order: Sequence[int], device: torch.device, kept: bool = False
) -> SectionCodes:
    each = 2 if layouts[0].signs else 1
    sizes = [each * int(layouts[0].numels[t]) for t in order]
    starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    counts = [int(layout.kept[t]) for layout in layouts for t in order]
    return SectionCodes(SectionLayout(starts * len(layouts), sizes * len(layouts), counts, 1), device, kept)


def lifted_together(
    grown_W: Sequence[Tensor], news_W: Sequence[Tensor], sizes: Sequence[int]
) -> tuple[list[Tensor], Tensor]:
    """`Engine.lifted` in launches that grow with the number of different bin sizes, not with that of the tensors."""
    W, device = len(grown_W[0]), grown_W[0].device
    order = sorted(range(len(sizes)), key=lambda t: sizes[t])
    numels = [grown_W[t].shape[1] for t in order]
    counts = [-(-n // sizes[t]) for t, n in zip(order, numels, strict=True)]
    zeros_W = grown_W[0].new_zeros(W, max(sizes))

    def padded(xs_W: Sequence[Tensor]) -> Tensor:
        pairs = ((in_rows(xs_W[t]), zeros_W[:, : -n % sizes[t]]) for t, n in zip(order, numels, strict=True))
        return torch.cat([piece_W for pair in pairs for piece_W in pair], dim=1)

    def in_bins(row_W: Tensor) -> list[Tensor]:
        """Rows of padded tensors as bins [W, bins, size], one tensor of bins for each size."""
        of_size = {
            size: sum(n for t, n in zip(order, counts, strict=True) if sizes[t] == size) for size in sorted(set(sizes))
        }
        parts_W = row_W.split([size * count for size, count in of_size.items()], dim=1)
        return [part_W.unflatten(1, (-1, size)) for size, part_W in zip(of_size, parts_W, strict=True)]

    row_W = padded(grown_W)
    largest_W = [bins_W.amax(2) for bins_W in in_bins(row_W.abs())]
    lifted_W = in_bins(padded(news_W).add_(row_W).abs_())
    for bins_W, lifted, largest in zip(in_bins(row_W.sign_()), lifted_W, largest_W, strict=True):
        bins_W.mul_(lifted >= largest[:, :, None])
    bins = upload(torch.tensor(counts * W), device)
    sums = torch.segment_reduce(torch.cat(largest_W, dim=1).double().flatten(), "sum", lengths=bins, unsafe=True)
    scales = (sums / bins).float()
    tensor = torch.searchsorted(bins.cumsum(0), torch.arange(W * sum(counts), device=device), right=True)
    of_bins_W = scales.to(row_W.dtype).index_select(0, tensor).view(W, -1)
    for bins_W, scale_W in zip(in_bins(row_W), of_bins_W.split([x.shape[1] for x in largest_W], dim=1), strict=True):
        bins_W.mul_(scale_W[:, :, None])
    widths = [sizes[t] * count for t, count in zip(order, counts, strict=True)]
    parts_W = dict(zip(order, row_W.split(widths, dim=1), strict=True))
    by_number = dict(zip(order, scales.view(W, -1).unbind(1), strict=True))
    sent_W = [parts_W[t][:, : grown_W[t].shape[1]] for t in range(len(sizes))]
    return sent_W, torch.stack([by_number[t] for t in range(len(sizes))], dim=1)
