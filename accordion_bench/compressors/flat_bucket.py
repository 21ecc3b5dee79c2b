"""FlatBucket: tensors of a bucket side by side in one row for each worker, so that one launch does for all of them.

Tensor suffixes: W local workers, T coordinates of all tensors.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from accordion_bench.codecs.bucket import Context
from accordion_bench.codecs.top_keys import Part


class FlatBucket:
    """Some tensors of a bucket side by side, those of equal shape and level next to each other.

    Args:
        ids: their indices in the bucket.
        ctx: names, shapes and levels.

    Attributes:
        ids: their indices, in the order in which they stand.
        groups: the same, in lists of equal shape and level.
        shapes: of each.
        sizes: entries of each.
        starts: where each begins in the row.
        total: T.
    """

    def __init__(self, ids: Iterable[int], ctx: Context) -> None:
        alike: dict[tuple[tuple[int, ...], float | None], list[int]] = {}
        for i in ids:
            alike.setdefault((ctx.specs[i].shape, ctx.levels[i]), []).append(i)
        self.groups = list(alike.values())
        self.ids = [i for group in self.groups for i in group]
        self.shapes = [ctx.specs[i].shape for i in self.ids]
        self.sizes = [ctx.specs[i].numel for i in self.ids]
        self.starts = [0, *itertools.accumulate(self.sizes)][:-1]
        self.total = sum(self.sizes)

    def rows(self, xs_W: Sequence[Tensor]) -> Tensor:
        """Its tensors out of all of the bucket's [W, ...], as rows [W, T]; a copy."""
        return torch.cat([xs_W[i].flatten(1) for i in self.ids], dim=1)

    def parts(self, kept: Sequence[int]) -> list[Part]:
        """Tensors of equal shape and level, and how many entries are kept of each; `kept` is in the order of `ids`."""
        parts, first = [], 0
        for group in self.groups:
            parts.append(Part(self.starts[first], len(group), self.sizes[first], kept[first]))
            first += len(group)
        return parts

    def add_(self, targets_W: Mapping[int, Tensor], row_W: Tensor, alpha: float) -> None:
        """Add alpha x the rows [W, T] to the targets [W, ...], by index; all of them at once."""
        found = [
            (i, part_W) for i, part_W in zip(self.ids, row_W.split(self.sizes, dim=1), strict=True) if i in targets_W
        ]
        if found:
            targets, parts = as_rows([targets_W[i] for i, _ in found]), as_rows([part_W for _, part_W in found])
            torch._foreach_add_(targets, parts, alpha=alpha)


def as_rows(xs_W: Iterable[Tensor]) -> list[Tensor]:
    """Tensors [W, ...] worker by worker, as vectors: kernels for lists want equal strides."""
    return [x.view(-1) for x_W in xs_W for x in x_W]
