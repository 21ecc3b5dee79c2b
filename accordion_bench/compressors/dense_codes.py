"""Dense codes: a small integer for every coordinate, for all tensors of a bucket at once.

Tensor suffixes: W local workers, A senders, R rows, N elements, M buckets, C chunks, L coordinates of a chunk, B bytes.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from accordion_bench.compressors import packed_codes
from accordion_bench.compressors.base import Context
from accordion_bench.compressors.chunks import Chunks, chunks_of
from accordion_bench.compressors.non_finite_row import NonFiniteRow, refuse_non_finite
from accordion_bench.compressors.oneshot import OneShot, put_
from accordion_bench.compressors.packed_codes import code_bytes, look_up, pack_codes
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors import kernels
from accordion_bench.tensors.counter_rng import BLOCK, block_keys, blocks_of, integers_of, streams_of
from accordion_bench.tensors.kernels.rounding import Rounding
from accordion_bench.tensors.kernels.table import BUCKET, Table, addresses
from accordion_bench.tensors.upload import table as kept

LONGEST = 1 << 16  # coordinates of a chunk: the end of a tensor is filled up to a whole one
AT_ONCE = 1 << 26  # coordinates of all senders that are decoded together
KEPT = 256  # tables remembered: of each bucket of a run, for each level and method


@dataclass(frozen=True)
class Form:
    """What a method's messages look like: scales, one float32 per bucket, then the packed codes of each stream.

    Args:
        levels: K of each stream of codes; a coordinate has a code in each.
        bucket: coordinates that share a scale; None = a whole tensor.
        norm: what of a bucket its scale comes from, `l1`, `l2` or `linf`; "" = there are no scales in the message.
        bits: random bits that a coordinate's rounding takes; 0 = nothing is drawn.
        balanced: buckets of a tensor are of equal size, as near to `bucket` as whole numbers allow.
    """

    levels: tuple[int, ...]
    bucket: int | None = None
    norm: str = ""
    bits: int = 0
    balanced: bool = False

    def size(self, n: int) -> int:
        """Coordinates in a bucket of a tensor of n."""
        if self.bucket is None or n <= self.bucket:
            return max(n, 1)
        return -(-n // -(-n // self.bucket)) if self.balanced else self.bucket

    def buckets(self, n: int) -> int:
        """Buckets of a tensor of n coordinates."""
        return -(-n // self.size(n))

    def header(self, n: int) -> int:
        """Bytes of its scales in a message."""
        return 4 * self.buckets(n) if self.norm else 0

    def parts(self, n: int) -> list[int]:
        """Bytes of a message's header and of each of its streams."""
        return [self.header(n), *(code_bytes(n, K) for K in self.levels)]

    def places(self, n: int, start: int) -> list[int]:
        """Where these begin in a buffer, when the message begins at `start`."""
        return list(itertools.accumulate(self.parts(n), initial=start))[:-1]

    @property
    def whole(self) -> int:
        """Coordinates that make whole blocks of random numbers and whole bytes of codes."""
        return BLOCK * (5 if 3 in self.levels else 1)

    @property
    def chunk(self) -> int:
        """Coordinates of a chunk: whole as above, and whole buckets where few are."""
        together = math.lcm(self.whole, self.bucket or 1)
        return together if together <= LONGEST else self.whole


class DenseCodes(OneShot):
    """C(v)_i = s_b prod_j value_j(code_j(v_i, s_b)), s_b the scale of the bucket b that i lies in.

    A subclass says what its messages look like (`form`), how scales come from norms (`scales`), which codes a
    coordinate gets (`codes`, by torch, and `kernel_rounding`, by kernels, to the same bits), and what codes stand for
    (`values`).
    Where all of that happens is decided here: in compiled loops on a CPU, as an array of chunks on a device, shape by
    shape where buckets fit no chunk. On a device nobody looks whether input is finite: it shows in the sum.
    """

    # ---- what a subclass writes

    def form(self, level: float) -> Form:
        """What messages look like."""
        raise NotImplementedError

    def scales(self, norms: Tensor, entries: Tensor) -> Tensor:
        """s_b of buckets as float32: norms and numbers of coordinates, float64 [..., M]."""
        return norms.float()

    def shared_scales(self, names: Sequence[str], device: torch.device) -> Tensor | None:
        """s of whole tensors that everybody knows, float32 [T], where messages have none."""
        return None

    def factors(self, scales: Tensor, level: float, ctx: Context) -> Tensor:
        """What coordinates are multiplied by before they are rounded, float32, of the shape of their scales."""
        return scales

    def codes(self, x: Tensor, factor: Tensor | None, draws: Tensor | None, level: float, ctx: Context) -> list[Tensor]:
        """The codes of coordinates, uint8 [..., N] of each stream, by torch.

        Args:
            x: float32 [..., N]; may be overwritten.
            factor: of their buckets, float32 [..., 1], where there are scales.
            draws: random integers below 2^bits, int32 [..., N], where any are drawn.
            level, ctx: as for `encode`.
        """
        raise NotImplementedError

    def kernel_rounding(self, level: float, ctx: Context) -> Rounding:
        """The same for `tensors.kernels.encode`."""
        raise NotImplementedError

    def values(self, level: float, ctx: Context) -> list[tuple[float, ...]]:
        """What the codes of each stream stand for; their product, times the scale, is the coordinate."""
        raise NotImplementedError

    # ---- what it gets for that

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return size_of(self.form(level), spec.numel)

    def sizes(self, specs: Sequence[TensorSpec], levels: Sequence[float]) -> list[int]:
        forms = {level: self.form(level) for level in dict.fromkeys(levels)}
        return [size_of(forms[level], spec.numel) for spec, level in zip(specs, levels, strict=True)]

    def codes_of(
        self, message_A: Tensor, spec: TensorSpec, level: float, ctx: Context
    ) -> tuple[Tensor, Sequence[float]]:
        form, book = self.form(level), self.values(level, ctx)[0]
        packed_A = message_A[:, form.header(spec.numel) :].contiguous()
        return packed_codes.unpack_codes(packed_A, len(book), spec.numel), book

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        """Rows of one shape by torch: the reference, and the way for buckets that fit no chunk."""
        form, n = self.form(level), spec.numel
        cells_R, header_R = in_buckets(x_R.float(), form.size(n)), x_R.new_empty(len(x_R), 0, dtype=torch.uint8)
        scales_R, draws_R = self.shared_scales([spec.name], x_R.device), None
        if form.norm:
            norms_R = torch.linalg.vector_norm(cells_R, ORDERS[form.norm], dim=2, dtype=torch.float64)
            scales_R = self.scales(norms_R, bucket_entries(n, form.size(n), x_R.device))
            refuse_non_finite(scales_R)
            header_R = scales_R.view(torch.uint8)
        else:
            refuse_non_finite(x_R)
        if form.bits:
            blocks_R = block_keys(keys, 0, -(-n // BLOCK), x_R.device)
            draws_R = in_buckets(integers_of(blocks_R, form.bits)[:, :n], form.size(n))
        factor_R = None if scales_R is None else self.factors(scales_R, level, ctx)[..., None]
        streams = [codes_R.flatten(1)[:, :n] for codes_R in self.codes(cells_R, factor_R, draws_R, level, ctx)]
        packed = [pack_codes(codes_R.contiguous(), K) for codes_R, K in zip(streams, form.levels, strict=True)]
        return torch.cat([header_R, *packed], dim=1)

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        form, n = self.form(level), spec.numel
        for message_R in message_AR:
            header_R, *streams = message_R.split(form.parts(n), dim=1)
            values_R = self._product(streams, level, ctx, n)
            scales_R = self.shared_scales([spec.name], total_R.device)
            if form.norm:
                scales_R = header_R.clone(memory_format=torch.contiguous_format).view(torch.float32)
            if scales_R is not None:
                scaled_R = in_buckets(values_R, form.size(n)) * scales_R.view(-1, form.buckets(n), 1)
                values_R = scaled_R.flatten(1)[:, :n]
            total_R.add_(values_R, alpha=alpha)

    def _product(self, streams: Sequence[Tensor], level: float, ctx: Context, count: int) -> Tensor:
        """What the packed codes [A, B] of all streams stand for, without scales: float32 [A, count]."""
        tables = self.values(level, ctx)
        factors = [look_up(codes_A, values, count) for codes_A, values in zip(streams, tables, strict=True)]
        return functools.reduce(torch.mul, factors)

    # ---- many tensors at once

    def encode_into_(
        self,
        message_W: Tensor,
        starts: Sequence[int],
        rows_W: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        level: float,
        ctx: Context,
        workers: Sequence[int],
        purpose: str = "",
    ) -> None:
        form, names = self.form(level), [spec.name for spec in specs]
        keys_W = (
            list(zip(*(self.keys(ctx, name, workers, purpose) for name in names), strict=True)) if form.bits else []
        )
        if room := kernels.room_of(rows_W):
            self._encode_by_kernel(room, message_W, starts, rows_W, names, level, ctx, keys_W)
        elif chunks := self._chunks(specs, form, message_W.device):
            self._encode_chunks(chunks, message_W, starts, rows_W, names, level, ctx, keys_W)
        else:
            super().encode_into_(message_W, starts, rows_W, specs, level, ctx, workers, purpose)

    def add_from_(
        self,
        targets_R: Sequence[Tensor],
        message_A: Tensor,
        starts: Sequence[int],
        specs: Sequence[TensorSpec],
        level: float,
        ctx: Context,
        alpha: float = 1.0,
        divisor: int = 1,
    ) -> None:
        form = self.form(level)
        if room := kernels.room_of(targets_R):
            self._add_by_kernel_(room, targets_R, message_A, starts, specs, level, ctx, alpha, divisor)
        elif chunks := self._chunks(specs, form, message_A.device):
            sizes = [self.message_bytes(spec, level) for spec in specs]
            own = [message_A[:, start : start + size] for start, size in zip(starts, sizes, strict=True)]
            sums = self._decode_chunks(chunks, own, specs, level, ctx, len(targets_R[0]))
            torch._foreach_add_(list(targets_R), sums, alpha=alpha)
            if divisor != 1:
                torch._foreach_div_(list(targets_R), divisor)
        else:
            super().add_from_(targets_R, message_A, starts, specs, level, ctx, alpha, divisor)

    # ---- by kernels

    def _encode_by_kernel(
        self,
        room: kernels.Room,
        message_W: Tensor,
        starts: Sequence[int],
        rows_W: Sequence[Tensor],
        names: Sequence[str],
        level: float,
        ctx: Context,
        keys_W: Sequence[Sequence[int]],
    ) -> None:
        form = self.form(level)
        rows_W = [contiguous(x_W) for x_W in rows_W]
        table = table_of(tuple(x_W.shape[1] for x_W in rows_W), tuple(starts), form)
        at, like = addresses(rows_W), rows_W[0]
        scales_W = self.shared_scales(names, message_W.device)
        if form.norm:
            scales_W = self.scales(room.bucket_norms(at, table, form.norm, like), entries_on(table, message_W.device))
            refuse_buckets(table, scales_W)
        factors_W = message_W.new_empty(0, 0, dtype=torch.float32)
        if scales_W is not None:
            factors_W = self.factors(scales_W, level, ctx).expand(len(message_W), -1)
        written_W = scales_W if form.norm else None
        streams = np.stack([streams_of(keys) for keys in keys_W]) if form.bits else np.empty((0, 0), np.uint64)
        rounding = self.kernel_rounding(level, ctx)
        finite = room.encode(at, table, written_W, factors_W, streams, message_W, like, rounding)
        if finite is not None and not finite.all():
            raise NonFiniteRow(int((~finite).flatten().nonzero()[0][0]))

    def _add_by_kernel_(
        self,
        room: kernels.Room,
        targets_R: Sequence[Tensor],
        message_A: Tensor,
        starts: Sequence[int],
        specs: Sequence[TensorSpec],
        level: float,
        ctx: Context,
        alpha: float,
        divisor: int,
    ) -> None:
        form = self.form(level)
        table = table_of(tuple(spec.numel for spec in specs), tuple(starts), form)
        scales_A = self.shared_scales([spec.name for spec in specs], message_A.device)
        if scales_A is not None:
            scales_A = scales_A.expand(len(message_A), -1)
        elif not form.norm:
            scales_A = message_A.new_empty(0, dtype=torch.float32)
        values = [np.array(book, np.float32) for book in self.values(level, ctx)]
        room.add_values(addresses(targets_R), table, scales_A, alpha, message_A, values, targets_R[0], divisor)

    # ---- as chunks, by torch

    def _chunks(self, specs: Sequence[TensorSpec], form: Form, device: torch.device) -> Chunks | None:
        """How to cut these tensors; None: shape by shape."""
        each_its_own = form.balanced and form.bucket
        if each_its_own or not Chunks.fit(form.bucket, form.chunk):
            return None
        return chunks_of(tuple(spec.numel for spec in specs), form.chunk, form.bucket, device)

    def _encode_chunks(
        self,
        chunks: Chunks,
        message_W: Tensor,
        starts: Sequence[int],
        rows_W: Sequence[Tensor],
        names: Sequence[str],
        level: float,
        ctx: Context,
        keys_W: Sequence[Sequence[int]],
    ) -> None:
        form, x_W = self.form(level), chunks.joined(rows_W).float()
        scales_W, draws_W, parts = self.shared_scales(names, x_W.device), None, []
        if form.norm:
            scales_W = self.scales(chunks.norms(x_W, ORDERS[form.norm]), chunks.entries)
            headers = chunks.headers(scales_W)
            refuse_non_finite_of(headers)
            parts.append([header_W.view(torch.uint8) for header_W in headers])
        else:
            refuse_non_finite_of(rows_W)
        if form.bits:
            blocks_W = blocks_of(keys_W, [count * chunks.length // BLOCK for count in chunks.counts], x_W.device)
            draws_W = chunks.cells(integers_of(blocks_W, form.bits).view(x_W.shape))
        factor_W = None
        if scales_W is not None:
            factor_W = chunks.spread(self.factors(scales_W, level, ctx).expand(len(x_W), -1))[..., None]
        for codes_W, K in zip(self.codes(chunks.cells(x_W), factor_W, draws_W, level, ctx), form.levels, strict=True):
            packed_W = pack_codes(codes_W.reshape(-1, chunks.length), K).unflatten(0, x_W.shape[:2])
            parts.append(chunks.codes(packed_W, [code_bytes(n, K) for n in chunks.lengths]))
        pieces = [part_W for of_tensor in zip(*parts, strict=True) for part_W in of_tensor]
        ends = [
            list(itertools.accumulate(form.parts(n), initial=start))
            for n, start in zip(chunks.lengths, starts, strict=True)
        ]
        first = 0 if form.norm else 1
        put_(message_W, [at for of_tensor in ends for at in of_tensor[first:-1]], pieces)

    def _decode_chunks(
        self,
        chunks: Chunks,
        messages_A: Sequence[Tensor],
        specs: Sequence[TensorSpec],
        level: float,
        ctx: Context,
        rows: int,
    ) -> list[Tensor]:
        """What messages [A, B] decode to, summed: [rows, N] of each tensor, a to row a mod rows."""
        at_once = rows * max(1, AT_ONCE // max(1, rows * chunks.count * chunks.length))
        form, total = self.form(level), None
        for first in range(0, len(messages_A[0]), at_once):
            parts = [
                message_A[first : first + at_once].split(form.parts(n), dim=1)
                for message_A, n in zip(messages_A, chunks.lengths, strict=True)
            ]
            headers, *streams = zip(*parts, strict=True)
            packed = [
                chunks.joined_codes(codes, code_bytes(chunks.length, K)).flatten(0, 1)
                for codes, K in zip(streams, form.levels, strict=True)
            ]
            values_A = self._product(packed, level, ctx, chunks.length).unflatten(0, (-1, chunks.count))
            scales_A = self.shared_scales([spec.name for spec in specs], values_A.device)
            scales_A = chunks.joined_headers(headers) if form.norm else scales_A
            if scales_A is not None:
                chunks.cells(values_A).mul_(chunks.spread(scales_A.view(-1, scales_A.shape[-1]))[..., None])
            part = values_A.unflatten(0, (-1, rows)).sum(0)
            total = part if total is None else total.add_(part)
        assert total is not None
        return chunks.rows(total)


ORDERS = {"l1": 1, "l2": 2, "linf": math.inf}


@functools.lru_cache(maxsize=1 << 16)
def size_of(form: Form, n: int) -> int:
    """Bytes of the message of a tensor of n coordinates; asked for each tensor several times in a step."""
    return sum(form.parts(n))


@functools.lru_cache(maxsize=KEPT)
def table_of(lengths: tuple[int, ...], starts: tuple[int, ...], form: Form) -> Table:
    """The table of tensors of these lengths, whose messages begin there, made once."""
    headers, *streams = zip(*(form.places(n, start) for n, start in zip(lengths, starts, strict=True)), strict=True)
    return Table(lengths, [form.size(n) for n in lengths], form.whole, headers, streams)


def in_buckets(x_R: Tensor, size: int) -> Tensor:
    """Rows [R, N] in buckets [R, m, size], zeros behind their ends."""
    return pad(x_R, (0, -x_R.shape[1] % size)).unflatten(1, (-1, size))


def bucket_entries(n: int, size: int, device: torch.device) -> Tensor:
    """How many coordinates each bucket of n has, float64 [m]."""
    starts = torch.arange(0, n, size, dtype=torch.float64, device=device)
    return (n - starts).clamp_max(size)


def norms_of(rows_W: Sequence[Tensor], norms: Sequence[str]) -> list[Tensor]:
    """Norms of whole tensors [W, N], none of them empty: float64 [W, T] each; `sum` is the plain sum."""
    lengths, device = tuple(x_W.shape[1] for x_W in rows_W), rows_W[0].device
    if room := kernels.room_of(rows_W):
        rows_W = [contiguous(x_W) for x_W in rows_W]
        table, at = table_of(lengths, (0,) * len(lengths), Form(())), addresses(rows_W)
        return [room.bucket_norms(at, table, norm, rows_W[0]) for norm in norms]
    chunks = chunks_of(lengths, BLOCK, None, device)
    x_W = chunks.joined(rows_W).float()
    sums = {"sum": lambda: chunks.by_bucket(x_W.sum(2, keepdim=True, dtype=torch.float64)).sum(2)}
    return [sums[norm]() if norm in sums else chunks.norms(x_W, ORDERS[norm]) for norm in norms]


def contiguous(x_W: Tensor) -> Tensor:
    """[W, N] with coordinates of a row side by side."""
    return x_W if x_W.stride(1) == 1 else x_W.contiguous()


@functools.lru_cache(maxsize=KEPT)
def entries_on(table: Table, device: torch.device) -> Tensor:
    """How many coordinates each bucket of a table has, float64 [M]."""
    return kept(torch.from_numpy(table.entries), device)


def refuse_buckets(table: Table, scales_W: Tensor) -> None:
    """Raise NonFiniteRow w T + t where a scale [W, M] of tensor t is not finite; on a device nobody looks."""
    if scales_W.device.type == "cpu" and not scales_W.isfinite().all():
        w, bucket = (~scales_W.isfinite()).nonzero()[0].tolist()
        tensor = int(np.searchsorted(table.rows[1:, BUCKET], bucket, side="right"))
        raise NonFiniteRow(w * (len(table.rows) - 1) + tensor)


def refuse_non_finite_of(parts_W: Sequence[Tensor]) -> None:
    """Raise NonFiniteRow w T + t where numbers [W, n] of tensor t are not finite; on a device nobody looks."""
    if parts_W[0].device.type == "cpu":
        refuse_non_finite(torch.stack([part_W.sum(1, dtype=torch.float64) for part_W in parts_W], dim=1).view(-1, 1))
