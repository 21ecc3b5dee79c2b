"""DenseCodes: one-shot compressors with a code for every coordinate, of all tensors at once on a device.

Tensor suffixes: W local workers, A all workers, C chunks, L coordinates of a chunk, M buckets.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors import packed_codes
from accordion_bench.compressors.base import Context
from accordion_bench.compressors.chunks import Chunks, chunks_of
from accordion_bench.compressors.oneshot import Group, OneShot
from accordion_bench.compressors.packed_codes import look_up_on_device
from accordion_bench.compressors.rounding.stochastic import encode_levels
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.counter_rng import BLOCK, blocks_of

LONGEST = 1 << 16  # coordinates of a chunk: the end of a tensor is filled up to a whole one
AT_ONCE = 1 << 26  # coordinates of all senders that are decoded together


@dataclass(frozen=True)
class Dense:
    """What a method's messages look like.

    Args:
        levels: K of each stream of codes; a coordinate has a code in each.
        bucket: coordinates that share a float32 in front of the codes; None = a whole tensor.
        header: whether there is such a number; else buckets are of no meaning to a receiver.
        draws: whether codes are drawn at random.
    """

    levels: tuple[int, ...]
    bucket: int | None = None
    header: bool = True
    draws: bool = True

    @property
    def length(self) -> int:
        """Coordinates of a chunk: whole blocks of random bits, whole bytes of codes, whole buckets where few do."""
        whole = BLOCK * (5 if 3 in self.levels else 1)
        together = math.lcm(whole, self.bucket or 1)
        return together if together <= LONGEST else whole


class Batch(NamedTuple):
    """Tensors that are encoded together.

    chunks: where they and their buckets lie.
    names: of each.
    level, ctx: as for `OneShot.encode`.
    """

    chunks: Chunks
    names: Sequence[str]
    level: float
    ctx: Context


class DenseCodes(OneShot):
    """On a device, tensors of any shapes are encoded and decoded as one array of chunks, all senders at once.

    The messages are those of `encode`, but for bits behind the last code of a tensor, which may be set. A subclass says
    what its messages look like, and has two more functions, on chunks. On a device nobody looks whether input is
    finite: what is not must show in the sum.
    """

    def dense(self, level: float, ctx: Context) -> Dense | None:
        """What messages look like; None: of these options, so that they must be made shape by shape."""
        raise NotImplementedError

    def encode_chunks(self, x_W: Tensor, blocks_W: Tensor, batch: Batch) -> tuple[Tensor | None, list[Tensor]]:
        """Chunks [W, C, L] of float32 as (float32 per bucket [W, M] or None, packed codes [W, C, B] of each stream).

        Args:
            x_W: coordinates, zeros behind the end of each tensor; may be overwritten.
            blocks_W: for random bits [W, C, blocks, 2]; empty where nothing is drawn.
            batch: which tensors.
        """
        raise NotImplementedError

    def decode_chunks(self, header_A: Tensor, codes_A: Sequence[Tensor], batch: Batch) -> Tensor:
        """The inverse: new float32 [A, C, L]; behind the end of a tensor there may be anything."""
        raise NotImplementedError

    # ---- what it gets for that

    def _chunks(self, specs: Sequence[TensorSpec], level: float, ctx: Context, device: torch.device) -> Chunks | None:
        """How to cut these tensors; None: one by one."""
        dense = self.dense(level, ctx)
        if device.type == "cpu" or dense is None or not Chunks.fit(dense.bucket, dense.length):
            return None
        return chunks_of(tuple(spec.numel for spec in specs), dense.length, dense.bucket, device)

    def encode_many(
        self,
        rows_W: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        level: float,
        ctx: Context,
        workers: Sequence[int],
        purpose: str = "",
    ) -> list[Tensor] | None:
        dense, names = self.dense(level, ctx), [spec.name for spec in specs]
        chunks = self._chunks(specs, level, ctx, rows_W[0].device)
        if dense is None or chunks is None:
            return None
        x_W = chunks.joined(rows_W).float()
        blocks_W = x_W.new_empty(0)
        if dense.draws:
            keys_W = zip(*(self.keys(ctx, name, workers, purpose) for name in names), strict=True)
            blocks_W = blocks_of(list(keys_W), [count * chunks.length // BLOCK for count in chunks.counts], x_W.device)
            blocks_W = blocks_W.unflatten(1, (chunks.count, -1))
        header_W, codes_W = self.encode_chunks(x_W, blocks_W, Batch(chunks, names, level, ctx))
        headers = [] if header_W is None else [[h.view(torch.uint8) for h in chunks.headers(header_W)]]
        streams = [
            chunks.codes(codes, [packed_codes.code_bytes(spec.numel, K) for spec in specs])
            for codes, K in zip(codes_W, dense.levels, strict=True)
        ]
        parts = [list(of_tensor) for of_tensor in zip(*headers, *streams, strict=True)]
        sizes = [sum(part.shape[1] for part in of_tensor) for of_tensor in parts]
        return list(torch.cat([part for of_tensor in parts for part in of_tensor], dim=1).split(sizes, dim=1))

    def sums_of_many(
        self, messages_A: Sequence[Tensor], specs: Sequence[TensorSpec], level: float, ctx: Context, rows: int = 1
    ) -> list[Tensor] | None:
        dense, names = self.dense(level, ctx), [spec.name for spec in specs]
        chunks = self._chunks(specs, level, ctx, messages_A[0].device)
        if dense is None or chunks is None:
            return None
        at_once = rows * max(1, AT_ONCE // max(1, rows * chunks.count * chunks.length))
        total = None
        for first in range(0, len(messages_A[0]), at_once):
            some = [message_A[first : first + at_once] for message_A in messages_A]
            header_A, codes_A = self._opened(some, dense, chunks)
            part = (
                self.decode_chunks(header_A, codes_A, Batch(chunks, names, level, ctx)).unflatten(0, (-1, rows)).sum(0)
            )
            total = part if total is None else total.add_(part)
        assert total is not None
        return chunks.rows(total)

    @staticmethod
    def _opened(messages_A: Sequence[Tensor], dense: Dense, chunks: Chunks) -> tuple[Tensor, list[Tensor]]:
        sizes = [[packed_codes.code_bytes(n, K) for K in dense.levels] for n in chunks.lengths]
        header = [4 * m if dense.header else 0 for m in chunks.buckets]
        parts = [
            message_A.split([first, *rest], dim=1)
            for message_A, first, rest in zip(messages_A, header, sizes, strict=True)
        ]
        headers, *streams = zip(*parts, strict=True)
        header_A = chunks.joined_headers(headers) if dense.header else messages_A[0].new_empty(0)
        per_chunk = [packed_codes.code_bytes(chunks.length, K) for K in dense.levels]
        return header_A, [chunks.joined_codes(codes, size) for codes, size in zip(streams, per_chunk, strict=True)]

    def encode_groups(self, xs_W: Sequence[Tensor], ctx: Context, levels: dict[int, float], comm: Comm) -> list[Group]:
        groups = []
        for level in dict.fromkeys(levels.values()):
            ids = [i for i, of in levels.items() if of == level]
            specs, rows_W = [ctx.specs[i] for i in ids], [xs_W[i].flatten(1) for i in ids]
            messages = self.encode_many(rows_W, specs, level, ctx, comm.local)
            if messages is None:
                groups += super().encode_groups(xs_W, ctx, dict.fromkeys(ids, level), comm)
            else:
                groups += [Group([i], level, m_W[:, None]) for i, m_W in zip(ids, messages, strict=True)]
        return groups

    def add_own_(
        self, targets_W: Mapping[int, Tensor], place: Mapping[int, tuple[Group, int]], ctx: Context, alpha: float
    ) -> None:
        apart = {}
        for ids, level in self._together(targets_W, place):
            messages = [place[i][0].message[:, place[i][1]] for i in ids]  # type: ignore[call-overload]
            rows = self.sums_of_many(messages, [ctx.specs[i] for i in ids], level, ctx, rows=len(messages[0]))
            if rows is None:
                apart.update({i: targets_W[i] for i in ids})
                continue
            targets = [targets_W[i].view(len(targets_W[i]), -1) for i in ids]
            torch._foreach_add_(targets, rows, alpha=alpha)
        super().add_own_(apart, place, ctx, alpha)

    @staticmethod
    def _together(ids: Mapping[int, Tensor], place: Mapping[int, tuple[Group, int]]) -> list[tuple[list[int], float]]:
        levels = dict.fromkeys(place[i][0].level for i in ids)
        return [([i for i in ids if place[i][0].level == level], level) for level in levels]

    def means(self, groups: Sequence[Group], ctx: Context, workers: int, like: Tensor) -> dict[int, Tensor]:
        means: dict[int, Tensor] = {}
        for level in dict.fromkeys(group.level for group in groups):
            own = [group for group in groups if group.level == level]
            specs = [ctx.specs[i] for group in own for i in group.ids]
            messages = [group.message[:, 0] for group in own]  # type: ignore[call-overload]
            sums = self.sums_of_many(messages, specs, level, ctx) if len(specs) == len(own) else None
            if sums is None:
                means |= super().means(own, ctx, workers, like)
                continue
            torch._foreach_div_(sums, workers)
            means |= {group.ids[0]: total[0] for group, total in zip(own, sums, strict=True)}
        return means


def rounded(x_W: Tensor, norms_W: Tensor, chunks: Chunks, levels: tuple[float, ...], blocks_W: Tensor) -> Tensor:
    """Chunks rounded at random to norm x level, see `encode_levels`: packed codes [W, C, B].

    Args:
        x_W: [W, C, L].
        norms_W: per bucket, float32 [W, M].
        chunks, blocks_W: as for `encode_chunks`.
        levels: K of them.
    """
    norms, size = chunks.spread(norms_W).flatten(0, 1), chunks.length // chunks.parts
    codes = encode_levels(x_W.flatten(0, 1), norms, size, levels, blocks_W.flatten(0, 1))
    return codes.unflatten(0, x_W.shape[:2])


def values_of(codes_A: Tensor, levels: tuple[float, ...], chunks: Chunks) -> Tensor:
    """The level of each packed code, float32 [A, C, L]."""
    return look_up_on_device(codes_A.flatten(0, 1), levels, chunks.length).unflatten(0, codes_A.shape[:2])


def scaled_(x_A: Tensor, per_bucket_A: Tensor, chunks: Chunks) -> Tensor:
    """Chunks [A, C, L] times the number of their bucket [A, M], in place."""
    x_A.unflatten(2, (chunks.parts, -1)).mul_(chunks.spread(per_bucket_A)[..., None])
    return x_A
