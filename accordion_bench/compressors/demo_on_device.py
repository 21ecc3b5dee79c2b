"""DeMo's exchange on a device: chunks of equal sides together, whatever tensors they are of, without waiting for it.

Tensor suffixes: W local workers, A all workers, C chunks of a group, N coefficients of a chunk, K sent of it.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from accordion_bench.codecs.section_codes import Layout, SectionCodes
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.base import Context, Exchanged, State
from accordion_bench.compressors.dct import Chunks
from accordion_bench.compressors.flat_bucket import as_rows
from accordion_bench.compressors.sparse_on_device import add_in_order_
from accordion_bench.plan import TensorSpec


class Method(Protocol):
    """What is asked of `demo.DeMo`."""

    decay: float
    value_dtype: torch.dtype

    def chunks(self, spec: TensorSpec) -> Chunks: ...

    def compresses(self, spec: TensorSpec, level: float | None) -> bool: ...

    def gathers(self, chunks: Chunks, k: int, workers: int) -> bool: ...


@dataclass(frozen=True)
class Alike:
    """Tensors whose chunks have equal sides.

    Args:
        ids: by index, those with equally many chunks side by side next to each other.
        chunks: how each is cut.
        k: coefficients sent of a chunk; None = all.
    """

    ids: list[int]
    chunks: list[Chunks]
    k: int | None

    @property
    def shape(self) -> Chunks:
        """Of a chunk."""
        return self.chunks[0]

    @property
    def counts(self) -> list[int]:
        """Chunks of each tensor."""
        return [chunks.count for chunks in self.chunks]

    def _widths(self) -> list[list[int]]:
        """Which of `ids` have equally many chunks side by side, by position."""
        by_width: dict[int, list[int]] = {}
        for position, chunks in enumerate(self.chunks):
            by_width.setdefault(chunks.m, []).append(position)
        return list(by_width.values())

    def cut(self, xs_W: Sequence[Tensor]) -> Tensor:
        """Out of the bucket's tensors [W, ...] these, as chunks [W, C, N]."""
        parts_W = []
        for positions in self._widths():
            grids_W = []
            for position in positions:
                x_W, c = xs_W[self.ids[position]], self.chunks[position]
                grids_W.append(x_W.reshape(len(x_W), c.n // c.a, c.a, c.m // c.b, c.b).transpose(2, 3))
            parts_W.append(torch.cat(grids_W, dim=1).flatten(1, 2).flatten(2))
        return parts_W[0] if len(parts_W) == 1 else torch.cat(parts_W, dim=1)

    def joined(self, chunks_W: Tensor) -> dict[int, Tensor]:
        """The inverse of `cut`: matrices [W, n, m], by index."""
        out, parts_W = {}, iter(chunks_W.split([sum(self.counts[p] for p in some) for some in self._widths()], dim=1))
        for positions, part_W in zip(self._widths(), parts_W, strict=True):
            c = self.chunks[positions[0]]
            grid_W = part_W.reshape(len(part_W), -1, c.m // c.b, c.a, c.b).transpose(2, 3)
            rows_W = grid_W.reshape(len(part_W), -1, c.m).contiguous()
            heights = [self.chunks[position].n for position in positions]
            for position, matrix_W in zip(positions, rows_W.split(heights, dim=1), strict=True):
                out[self.ids[position]] = matrix_W
        return out


def alike(demo: Method, ctx: Context) -> list[Alike]:
    """The tensors of a bucket by the sides of their chunks, and by k."""
    found: dict[tuple[int, int, int | None], list[int]] = {}
    cut = [demo.chunks(spec) for spec in ctx.specs]
    for i, (spec, level) in enumerate(zip(ctx.specs, ctx.levels, strict=True)):
        k = int(level) if level is not None and demo.compresses(spec, level) else None
        found.setdefault((cut[i].a, cut[i].b, k), []).append(i)
    by_width = [(sorted(ids, key=lambda i: cut[i].m), k) for (_, _, k), ids in found.items()]
    return [Alike(ids, [cut[i] for i in ids], k) for ids, k in by_width]


def exchange(
    demo: Method,
    xs_W: Sequence[Tensor],
    ctx: Context,
    state: State,
    comm: Comm,
    by_owners: Callable[[Tensor, Tensor, Chunks, int], Tensor],
) -> Exchanged:
    """`DeMo.exchange`; nobody looks whether numbers are finite: the signs of what is not are NaN.

    Args:
        demo: the method.
        xs_W, ctx, state, comm: as for `DeMo.exchange`.
        by_owners: called with positions and values [W, C, K], chunks and k, gives the common signs [C, N].
    """
    groups = alike(demo, ctx)
    deltas_W = [[state[ctx.specs[i].name]["delta_W"] for i in group.ids] for group in groups]
    _move_(deltas_W, groups, xs_W, ctx, demo.decay)
    moved_W = [torch.cat(deltas, dim=1) for deltas in deltas_W]  # [W, C, N]

    sent: dict[int, tuple[Tensor, Tensor]] = {}  # by group: positions, values [W, C, K]
    own_W = list(moved_W)
    for number, (group, rows_W) in enumerate(zip(groups, moved_W, strict=True)):
        if group.k is not None:
            positions_W = rows_W.abs().topk(group.k, dim=2, sorted=False).indices.sort(dim=2).values
            values_W = _as_sent(rows_W.gather(2, positions_W), demo.value_dtype)
            sent[number] = positions_W, values_W
            own_W[number] = torch.zeros_like(rows_W).scatter_(2, positions_W, values_W)
    parts_W = [
        part_W for group, rows_W in zip(groups, own_W, strict=True) for part_W in rows_W.split(group.counts, dim=1)
    ]
    flat_deltas = [delta_W for deltas in deltas_W for delta_W in deltas]
    if flat_deltas:
        torch._foreach_sub_(as_rows(flat_deltas), as_rows(parts_W))

    update: list[Tensor] = [xs_W[0]] * len(xs_W) if xs_W else []
    for group, signs in zip(groups, _signs(demo, groups, moved_W, sent, comm, by_owners), strict=True):
        for i, joined in group.joined(signs[None]).items():
            update[i] = joined.view(ctx.specs[i].shape)

    @functools.cache  # for several who subtract
    def own() -> dict[int, Tensor]:
        pairs = zip(groups, own_W, strict=True)
        return {i: x_W for group, c_W in pairs for i, x_W in group.joined(group.shape.chunks_from(c_W)).items()}

    def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
        if targets_W:
            torch._foreach_sub_(as_rows(targets_W.values()), as_rows([own()[i] for i in targets_W]))

    return Exchanged(update, subtract_sent_)


def _move_(
    deltas_W: list[list[Tensor]], groups: list[Alike], xs_W: Sequence[Tensor], ctx: Context, decay: float
) -> None:
    """d <- decay d + lr T g, of all tensors at once."""
    deltas, news, lrs = [], [], []
    for group, own_W in zip(groups, deltas_W, strict=True):
        chunks_W = group.shape.coefficients(group.cut(xs_W))
        deltas += as_rows(own_W)
        news += as_rows(chunks_W.split(group.counts, dim=1))
        lrs += [float(ctx.lrs[i]) for i in group.ids for _ in range(len(chunks_W))]
    if deltas:
        torch._foreach_mul_(deltas, decay)
        torch._foreach_mul_(news, lrs)
        torch._foreach_add_(deltas, news)


def _as_sent(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values as the others decode them; NaN and infinity stay what they are."""
    if dtype == torch.float32:
        return values.float().to(values.dtype)
    limit = torch.finfo(dtype).max
    return torch.where(values.isfinite(), values.clamp(-limit, limit), values).to(dtype).to(values.dtype)


def _signs(
    demo: Method,
    groups: list[Alike],
    moved_W: list[Tensor],
    sent: dict[int, tuple[Tensor, Tensor]],
    comm: Comm,
    by_owners: Callable[[Tensor, Tensor, Chunks, int], Tensor],
) -> list[Tensor]:
    """Per group the common signs, chunk by chunk: [C, N]."""
    signs = [rows_W[0] for rows_W in moved_W]
    whole = [number for number in range(len(groups)) if number not in sent]
    for number, mean in zip(whole, comm.all_reduce_mean([moved_W[number] for number in whole]), strict=True):
        signs[number] = signs_of(groups[number].shape.chunks_from(mean))
    gathered = [g for g in sent if demo.gathers(groups[g].shape, groups[g].k or 0, comm.workers)]
    if gathered:
        means = _gathered([sent[g] for g in gathered], [groups[g] for g in gathered], demo.value_dtype, comm)
        for number, mean in zip(gathered, means, strict=True):
            signs[number] = signs_of(groups[number].shape.chunks_from(mean))
    for number in [number for number in sent if number not in gathered]:
        group = groups[number]
        signs[number] = by_owners(*sent[number], group.shape, group.k or 0)
    return signs


def _gathered(sent: list[tuple[Tensor, Tensor]], groups: list[Alike], dtype: torch.dtype, comm: Comm) -> list[Tensor]:
    """Coefficients [C, N] of groups, each averaged over the workers that sent it."""
    shapes = tuple((sum(group.counts), group.shape.numel, group.k or 0) for group in groups)
    values_W = torch.cat([values.flatten(1) for _, values in sent], dim=1)
    places, first = [], 0
    for (count, numel, _), (positions_W, _) in zip(shapes, sent, strict=True):
        begin = torch.arange(first, first + count * numel, numel, device=values_W.device)
        places.append((positions_W + begin[:, None]).flatten(1))
        first += count * numel
    codes = SectionCodes(chunk_layout(shapes), values_W.device)
    value_bytes = values_W.to(dtype).view(torch.uint8)
    message_A = comm.all_gather(torch.cat([value_bytes, codes.encode(torch.cat(places, dim=1))], dim=1))
    end = value_bytes.shape[1]
    # a copy, because a row may begin where no number of this type does
    values_A = message_A[:, :end].clone(memory_format=torch.contiguous_format).view(dtype).to(values_W.dtype)
    positions_A = codes.decode(message_A[:, end:])
    mean = _mean_over_senders(positions_A, values_A, first)
    sizes = [count * numel for count, numel, _ in shapes]
    return [part.view(-1, numel) for part, (_, numel, _) in zip(mean.split(sizes), shapes, strict=True)]


def signs_of(x: Tensor) -> Tensor:
    """-1, 0, 1, and NaN for what is not finite, of which nobody would notice the sign; x is overwritten."""
    return x.sign().add_(x.sub_(x))


def averaged(positions_A: Tensor, values_A: Tensor, numel: int) -> Tensor:
    """Coefficients [C, N] of chunks, each averaged over the workers that sent it: positions and values [A, C, K]."""
    total = positions_A.shape[1] * numel
    begin = torch.arange(0, total, numel, device=positions_A.device)
    places_A = (positions_A + begin[:, None]).flatten(1)
    return _mean_over_senders(places_A, values_A.flatten(1), total).view(-1, numel)


def _mean_over_senders(positions_A: Tensor, values_A: Tensor, total: int) -> Tensor:
    """Row [T] of the mean of values [A, K] at each position over those who have it."""
    everywhere = positions_A.flatten()
    # counts are exact in any order of summation
    senders = values_A.new_zeros(total).scatter_add_(0, everywhere, torch.ones_like(values_A).flatten())
    shares_A = values_A / senders.index_select(0, everywhere).view(values_A.shape)
    return add_in_order_(values_A.new_zeros(total), list(positions_A), list(shares_A))


@functools.lru_cache(64)
def chunk_layout(shapes: tuple[tuple[int, int, int], ...]) -> Layout:
    """One message of chunks: so many of N coefficients, of which k are sent, for each of some shapes."""
    sizes = [numel for count, numel, _ in shapes for _ in range(count)]
    counts = [k for count, _, k in shapes for _ in range(count)]
    return Layout([0, *itertools.accumulate(sizes)][:-1], sizes, counts, len(sizes))
