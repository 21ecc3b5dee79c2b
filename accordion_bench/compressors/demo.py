"""DeMo: decoupled momentum; each worker sends the largest DCT coefficients of its own momentum.

Tensor suffixes: W local workers, A all workers, C chunks of a group, N coefficients of a chunk, K sent of it, B bytes.
"""

import bisect
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from accordion_bench.codecs import packed_codes
from accordion_bench.codecs.bucket import NonFiniteRow, rates_of, refuse_non_finite
from accordion_bench.codecs.engines import engine_for
from accordion_bench.codecs.layout import Transfer
from accordion_bench.codecs.matrix_tiles import Chunks
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import Compressor, Context, Exchanged, Kept, State, zeros_in_state
from accordion_bench.compressors.description import OptimizerPart, Traits, WhyDense, shorter_messages
from accordion_bench.compressors.gathered import non_finite
from accordion_bench.compressors.probe import Probed, probe_exchanged
from accordion_bench.options.checks import ValueRefused
from accordion_bench.options.instantiate import Config
from accordion_bench.options.option import NEAREST, Choice, option, with_options
from accordion_bench.plan import TensorSpec

TOGETHER = 1 << 22  # coordinates per group: the allocator reuses buffers of that size, but not larger ones
VALUES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ChunkGroup:
    """Tensors whose chunks have equal sides; their shapes may differ.

    Args:
        ids: indices of the tensors.
        chunks: the chunks of each tensor.
        k: coefficients sent per chunk; None = all.
    """

    ids: list[int]
    chunks: list[Chunks]
    k: int | None

    @property
    def shape(self) -> Chunks:
        """Sides of a chunk."""
        return self.chunks[0]

    @property
    def counts(self) -> list[int]:
        """Number of chunks of each tensor."""
        return [chunks.count for chunks in self.chunks]

    def coefficients(self, xs_W: Sequence[Tensor]) -> Tensor:
        """Return T x [W, C, N] of the bucket's tensors [W, ...], chunk by chunk and tensor by tensor."""
        first = xs_W[self.ids[0]]
        cut_W = first.new_empty(len(first), sum(self.counts), self.shape.numel)
        parts_W = zip(self.chunks, cut_W.split(self.counts, dim=1), strict=True)
        grids_W = [chunks.grid(xs_W[i]) for i, chunks in zip(self.ids, self.chunks, strict=True)]
        torch._foreach_copy_([chunks.grid_of_tiles(part_W) for chunks, part_W in parts_W], grids_W)
        return self.shape.coefficients(cut_W)

    def joined(self, chunks_W: Tensor) -> dict[int, Tensor]:
        """Return chunks [W, C, N] as matrices [W, n, m], by index of the tensor."""
        W, sizes = len(chunks_W), [chunks.n * chunks.m for chunks in self.chunks]
        matrices_W = chunks_W.new_empty(W * sum(sizes)).split([W * size for size in sizes])
        parts_W = zip(self.chunks, chunks_W.split(self.counts, dim=1), strict=True)
        views_W = [own.view(W, chunks.n, chunks.m) for own, chunks in zip(matrices_W, self.chunks, strict=True)]
        grids_W = [chunks.grid(view_W) for view_W, chunks in zip(views_W, self.chunks, strict=True)]
        torch._foreach_copy_(grids_W, [chunks.grid_of_tiles(part_W) for chunks, part_W in parts_W])
        return dict(zip(self.ids, views_W, strict=True))


class SentCoefficients(NamedTuple):
    """Coefficients sent of a group, as decoded: positions and values [W, C, K], or None and all of T d [W, C, N]."""

    positions: Tensor | None
    values: Tensor


def _why_dense(compressor: "DeMo", spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
    if not spec.numel or compressor.compresses(spec, level):
        return None
    return WhyDense(
        f"{level:g} values with their positions would be no smaller than a chunk", shorter_messages(compressor)
    )


def _probe_input(compressor: "DeMo", ps_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> Probed:
    empty = {spec.name: {"delta_W": torch.zeros_like(state[spec.name]["delta_W"])} for spec in ctx.specs}
    return probe_exchanged(compressor, ps_W, replace(ctx, lrs=[1.0] * len(ps_W)), empty, workers)


def _label_suffix(options: Config) -> str:
    bits = ", 1 bit" if options.get("value_bits") == 1 else ""
    return bits + (", looking ahead" if options.get("look_ahead") else "")


@with_options
class DeMo(Compressor):
    """d_w <- decay d_w + lr g_w;  q_w = the k largest of T d_w, per chunk;  d_w <- d_w - T^-1 q_w;
    update = sign( T^-1 (mean of q_w over the workers that sent the coefficient) );  x <- x - lr update.

    T is the orthonormal DCT-II of chunks a x b: a is the largest divisor of the first dimension that is at most
    `chunk`, b that of the product of the other dimensions; 1-D tensors have vectors of length a. d is the only
    momentum, and also the residual; the state stores T d.

    A message contains, per chunk, k values in `value_dtype` and their sorted positions in the smaller code of
    `index_codes`. If that is not smaller than the chunk (k = all of it), d is exchanged uncompressed, by all-reduce.

    Workers are summed in a fixed order. If an all-gather costs more wire bytes than a dense all-reduce (with the
    defaults from 200 workers on for chunks of 64 x 64, from 4 on for vectors), each worker receives a share of the
    chunks by all-to-all, averages it, and returns the signs, 2 bits per coordinate. The training is the same.

    Coefficients on the wire have the unit of lr x gradient. Values that float16 cannot represent (below 6e-8, above
    65,504) remain in d. With `value_bits=1` a coefficient is sent as its sign; update = sign( T^-1 (sum of the signs)
    ), and d loses the coefficients themselves. k is then usually 4 to 8.

    With `look_ahead` a worker computes its gradients at x - lr s_w, where s_w = sign(d_w) of the last step before q_w
    was removed, with the lr of that step. s_w and the separate parameters cost each worker twice the model's memory.

    Source: Peng, Quesnelle, Kingma 2024 (arXiv 2411.19870), Algorithm 1; one bit: DisTrO, in the code of psyche.
    """

    k: int = option("coefficients sent per chunk; lower k = more compression", default=32, at_least=1, instead=NEAREST)
    decay: float = option("decay of the workers' momenta per step", default=0.999, at_least=0, at_most=1)
    chunk: int = option("largest side of a chunk", default=64, at_least=1)
    value_dtype: str = option(default="float32", choices=tuple(VALUES))
    value_bits: int | None = option(
        "1 = signs of the coefficients in one bit each (DisTrO), with k 4 to 8; null = value_dtype",
        default=None,
        choices=(1,),
    )

    look_ahead: bool = option(
        "gradients at x - lr sign(d_w), with d_w before the sent coefficients are removed (DisTrO)",
        default=False,
    )

    chosen_as = {
        "demo": Choice(
            "the largest DCT coefficients of each worker's momentum, which replaces the optimizer's (Peng et al. 2024)",
            brings={
                "optimizer.momentum": (0.0, ""),
                "optimizer.lr": (1e-3, "step size of every parameter in every step"),
                "schedule.lr_scaling": ("sqrt", "the size of a sign step does not grow with the workers"),
            },
        )
    }

    description = replace(
        Compressor.description,
        collective_reason="a coefficient is averaged over the workers that sent it, "
        "and that is not a sum over all workers",
        requires={"optimizer": {"momentum": 0.0}},
        why_dense=_why_dense,
        probe_input=_probe_input,
        label_suffix=_label_suffix,
    )

    traits = Traits(
        knob="k",
        pair=(8, 32),
        reduces="other",
        collectives=("all_gather",),
        optimizer=OptimizerPart(frozenset({"momentum"})),
        replays=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k > (most := self.chunk**2):
            raise ValueRefused("k", f"at most {most}, the coefficients of a chunk", self.k, most)
        self.dtype, self.signs = VALUES[self.value_dtype], self.value_bits is not None
        if self.look_ahead:
            self.traits = replace(self.traits, optimizer=replace(self.traits.optimizer, looks_ahead=True))

    def chunks(self, spec: TensorSpec) -> Chunks:
        return Chunks.of(spec, self.chunk)

    def value_bytes(self, k: int) -> int:
        """Return the bytes of the k values, or signs, of a chunk."""
        return (k + 7) // 8 if self.signs else k * self.dtype.itemsize

    def chunk_bytes(self, chunks: Chunks, k: int) -> int:
        """Return B, the bytes of the message of one chunk: k values and their positions."""
        return self.value_bytes(k) + packed_codes.index_bytes(chunks.numel, k)[1]

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        if level is None or spec.numel == 0:
            return False
        chunks = self.chunks(spec)
        return level < chunks.numel and self.chunk_bytes(chunks, int(level)) < 4 * chunks.numel

    def gathers(self, chunks: Chunks, k: int, workers: int) -> bool:
        """Whether an all-gather costs fewer wire bytes than a dense all-reduce: (A-1) B < 2 (A-1)/A 4N."""
        return self.chunk_bytes(chunks, k) * max(workers, 2) < 8 * chunks.numel

    def transfers(self, spec: TensorSpec, level: float, workers: int, kept: Kept = None) -> Sequence[Transfer]:
        chunks, k = self.chunks(spec), int(level)
        nbytes = chunks.count * self.chunk_bytes(chunks, k)
        if self.gathers(chunks, k, workers):
            return [Transfer("all_gather", nbytes)]
        return [Transfer("all_to_all", nbytes), Transfer("all_gather_shards", chunks.count * answer_bytes(chunks))]

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        """Store the coefficients of tensors whose chunks have equal sides in one contiguous buffer."""
        state: State = {}
        for ids in _of_equal_sides([self.chunks(spec) for spec in specs]):
            counts, N = [self.chunks(specs[i]).count for i in ids], self.chunks(specs[ids[0]]).numel
            block_W = torch.zeros(comm.local_workers, sum(counts), N, dtype=like.dtype, device=like.device)
            for i, delta_W in zip(ids, block_W.split(counts, dim=1), strict=True):
                state[specs[i].name] = {"delta_W": delta_W}
        if self.look_ahead:
            zeros_in_state(state, "ahead_W", specs, comm, like)
        return {spec.name: state[spec.name] for spec in specs}

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        groups = self._groups(ctx)
        sent = [self._take(group, xs_W, ctx, state, comm) for group in groups]
        update: list[Tensor] = [xs_W[0]] * len(xs_W) if xs_W else []
        for group, signs in zip(groups, self._signs(groups, sent, comm), strict=True):
            for i, joined in group.joined(signs[None]).items():
                update[i] = joined.view(ctx.specs[i].shape)

        @functools.cache  # because several callers may subtract
        def own() -> dict[int, Tensor]:
            out: dict[int, Tensor] = {}
            for group, (positions, values) in zip(groups, sent, strict=True):
                if positions is not None:
                    zeros = values.new_zeros(*values.shape[:2], group.shape.numel)
                    values = zeros.scatter_(2, positions, values)
                out |= group.joined(group.shape.chunks_from(values))
            return out

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            if targets_W:
                parts_W = [own()[i].view(target_W.shape) for i, target_W in targets_W.items()]
                torch._foreach_sub_(list(targets_W.values()), parts_W)

        return Exchanged(update, subtract_sent_)

    def _groups(self, ctx: Context) -> list[ChunkGroup]:
        cut = [self.chunks(spec) for spec in ctx.specs]
        pairs = zip(ctx.specs, ctx.levels, strict=True)
        ks = [int(level) if level is not None and self.compresses(spec, level) else None for spec, level in pairs]
        return [ChunkGroup(ids, [cut[i] for i in ids], ks[ids[0]]) for ids in _of_equal_sides(cut, ks)]

    def _take(
        self, group: ChunkGroup, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm
    ) -> SentCoefficients:
        """Update d of a group's tensors, and remove from it the coefficients to send, which are returned."""
        deltas_W = [state[ctx.specs[i].name]["delta_W"] for i in group.ids]
        beside_W = side_by_side(deltas_W)
        rows_W = torch.cat(deltas_W, dim=1) if beside_W is None else beside_W
        new_W, rates = group.coefficients(xs_W), rates_of(ctx, group.ids, rows_W)
        rows_W.mul_(self.decay)
        if len(rates) == 1 and isinstance(rates[0][0], float):
            rows_W.add_(new_W, alpha=rates[0][0])
        else:
            parts_W = dict(zip(group.ids, new_W.split(group.counts, dim=1), strict=True))
            for rate, ids in rates:
                torch._foreach_mul_([parts_W[i] for i in ids], rate)
            rows_W.add_(new_W)
        if self.look_ahead:
            ahead_W = group.joined(signs_of(group.shape.chunks_from(rows_W)))
            for i, signs_W in ahead_W.items():
                state[ctx.specs[i].name]["ahead_W"].copy_(signs_W.view(xs_W[i].shape))
        if group.k is None:
            sent = SentCoefficients(None, rows_W.clone())
            rows_W.zero_()
        else:
            # ascending, as the index codes require
            positions_W = rows_W.abs().topk(group.k, dim=2, sorted=False).indices.sort(dim=2).values
            values_W = rows_W.gather(2, positions_W)
            self._refuse_non_finite(values_W, group, ctx, comm)
            sent = SentCoefficients(positions_W, values_W if self.signs else self._as_sent(values_W))
            rows_W.scatter_add_(2, positions_W, -sent.values)
        if beside_W is None:
            torch._foreach_copy_(deltas_W, list(rows_W.split(group.counts, dim=1)))
        return sent

    def _as_sent(self, values_W: Tensor) -> Tensor:
        """Return values as the other workers decode them."""
        limit = torch.finfo(self.dtype).max
        cut_W = torch.where(values_W.isfinite(), values_W.clamp(-limit, limit), values_W)
        return cut_W.to(self.dtype).to(values_W.dtype)

    @staticmethod
    def _refuse_non_finite(values_W: Tensor, group: ChunkGroup, ctx: Context, comm: Comm) -> None:
        try:
            refuse_non_finite(values_W.flatten(0, 1))
        except NonFiniteRow as bad:
            worker, chunk = divmod(bad.row, values_W.shape[1])
            g = bisect.bisect_right(list(itertools.accumulate(group.counts)), chunk)
            raise non_finite(ctx, group.ids[g], comm.first_named + worker) from None

    def _signs(self, groups: Sequence[ChunkGroup], sent: Sequence[SentCoefficients], comm: Comm) -> list[Tensor]:
        """Return the common signs of each group, chunk by chunk: [C, N]."""
        signs: list[Tensor] = [own.values for own in sent]
        whole = [number for number, group in enumerate(groups) if group.k is None]
        for number, mean in zip(whole, comm.all_reduce_mean([sent[number].values for number in whole]), strict=True):
            signs[number] = signs_of(groups[number].shape.chunks_from(mean))
        others = [(number, group) for number, group in enumerate(groups) if group.k is not None]
        gathered = [number for number, group in others if self.gathers(group.shape, group.k or 0, comm.workers)]
        if gathered:
            messages_W = [self._pack(sent[number], groups[number]).flatten(1) for number in gathered]
            message_A = comm.all_gather(torch.cat(messages_W, dim=1))
            parts = message_A.split([message_W.shape[1] for message_W in messages_W], dim=1)
            for number, part_A in zip(gathered, parts, strict=True):
                signs[number] = self._sign_of_mean(part_A, groups[number], sent[number].values.dtype)
        for number, group in others:
            if number not in gathered:
                own = sent[number]
                signs[number] = self._by_owners(self._pack(own, group), group, own.values.dtype, comm)
        return signs

    def _by_owners(self, message_W: Tensor, group: ChunkGroup, dtype: torch.dtype, comm: Comm) -> Tensor:
        """Return signs [C, N] of chunks with messages [W, C, B]; each worker averages its share of the chunks."""
        cuts = [w * message_W.shape[1] // comm.workers for w in range(comm.workers + 1)]
        shares = list(itertools.pairwise(cuts))
        received = comm.all_to_all([message_W[:, start:stop].flatten(1) for start, stop in shares])
        answers = [pack_signs(self._sign_of_mean(message_A, group, dtype)) for message_A in received]
        sizes_A = [(stop - start) * answer_bytes(group.shape) for start, stop in shares]
        return unpack_signs(torch.cat(comm.all_gather_uneven(answers, sizes_A)), group.shape, dtype)

    def _pack(self, sent: SentCoefficients, group: ChunkGroup) -> Tensor:
        """Return the messages [W, C, B] of a group: values, then positions, per chunk."""
        assert sent.positions is not None
        (W, _, k), N = sent.values.shape, group.shape.numel
        rows = sent.values.reshape(-1, k)
        values = packed_codes.pack_bits(rows >= 0) if self.signs else rows.to(self.dtype).view(torch.uint8)
        packed = torch.cat([values, packed_codes.encode_indices(sent.positions.view(-1, k), N)], dim=1)
        return packed.view(W, -1, packed.shape[1])

    def _sign_of_mean(self, message_A: Tensor, group: ChunkGroup, dtype: torch.dtype) -> Tensor:
        """Return the signs of some chunks [.., N] from all workers' messages [A, .. B]."""
        return signs_of(group.shape.chunks_from(self._over_senders(message_A, group, dtype)))

    def _over_senders(self, message_A: Tensor, group: ChunkGroup, dtype: torch.dtype) -> Tensor:
        """Return the coefficients of some chunks [.., N], averaged over their senders; signs are summed instead."""
        chunks, k, A = group.shape, group.k, len(message_A)
        assert k is not None
        rows, end = message_A.reshape(-1, self.chunk_bytes(chunks, k)), self.value_bytes(k)
        # a clone, because contiguous() keeps a single row at an offset and stride that may not be multiples of 4
        sent = rows[:, :end].clone(memory_format=torch.contiguous_format)
        numbers = packed_codes.unpack_bits(sent, k).to(dtype) * 2 - 1 if self.signs else sent.view(self.dtype)
        values_A = numbers.to(dtype).view(A, -1, k)
        positions_A = packed_codes.decode_indices(rows[:, end:].contiguous(), chunks.numel, k).view(A, -1, k)
        mean = values_A.new_zeros(values_A.shape[1], chunks.numel)
        everywhere = positions_A.transpose(0, 1).flatten(1)  # counts are exact in any order of summation
        if self.signs:
            return mean.scatter_add_(1, everywhere, values_A.transpose(0, 1).flatten(1))
        senders = torch.zeros_like(mean).scatter_add_(1, everywhere, torch.ones_like(everywhere, dtype=dtype))
        for positions, values in zip(positions_A, values_A, strict=True):
            mean.scatter_add_(1, positions, values / senders.gather(1, positions))
        return mean

    def compressor_input(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        """Return decay d + lr g."""
        moved_W = []
        for spec, x_W, lr in zip(ctx.specs, xs_W, ctx.lrs, strict=True):
            d_W = self.chunks(spec).inverse(state[spec.name]["delta_W"]).view(x_W.shape)
            moved_W.append(self.decay * d_W + lr * x_W)
        return moved_W


def _of_equal_sides(cut: Sequence[Chunks], ks: Sequence[int | None] = ()) -> list[list[int]]:
    """Group tensors by the sides of their chunks and the coefficients sent, up to `TOGETHER` coordinates per group."""
    groups: list[list[int]] = []
    latest: dict[tuple[int, int, int | None], tuple[list[int], int]] = {}
    for i, chunks in enumerate(cut):
        sides, n = (chunks.a, chunks.b, ks[i] if ks else None), chunks.n * chunks.m
        ids, size = latest.get(sides, ([], 0))
        if not ids or size + n > TOGETHER:
            ids, size = [], 0
            groups.append(ids)
        ids.append(i)
        latest[sides] = ids, size + n
    return groups


def side_by_side(parts_W: Sequence[Tensor]) -> Tensor | None:
    """Return tensors [W, C, N] as a view [W, sum C, N]; None if they are not adjacent in memory."""
    first, place = parts_W[0], parts_W[0].data_ptr()
    for part_W in parts_W:
        alike = part_W.stride() == first.stride() and part_W.untyped_storage().data_ptr() == (
            first.untyped_storage().data_ptr()
        )
        if not alike or part_W.data_ptr() != place or part_W.stride(1) != part_W.shape[2]:
            return None
        place += part_W[0].numel() * part_W.element_size()
    count = sum(part_W.shape[1] for part_W in parts_W)
    return first.as_strided((len(first), count, first.shape[2]), first.stride())


def signs_of(x: Tensor) -> Tensor:
    """Return -1, 0 or 1, and NaN for non-finite input that was not refused earlier; overwrites x."""
    return x.sign_() if engine_for([x]).checks_input else x.sign().add_(x.sub_(x))


def answer_bytes(chunks: Chunks) -> int:
    """Return the bytes of the signs of one chunk."""
    return 2 * ((chunks.numel + 7) // 8)


def pack_signs(signs: Tensor) -> Tensor:
    """Pack -1, 0, 1 [C, N] into bytes [C answer_bytes]: per chunk a bit mask of positive and of negative entries."""
    up, down = signs > 0, signs < 0
    if not engine_for([signs]).checks_input:
        nan = signs.isnan()  # encoded as both positive and negative
        up, down = up | nan, down | nan
    return torch.cat([packed_codes.pack_bits(up), packed_codes.pack_bits(down)], dim=1).flatten()


def unpack_signs(message: Tensor, chunks: Chunks, dtype: torch.dtype) -> Tensor:
    """Return the signs [C, N] that `pack_signs` packed."""
    positive, negative = message.view(-1, answer_bytes(chunks)).chunk(2, dim=1)
    up, down = (packed_codes.unpack_bits(bits.contiguous(), chunks.numel) for bits in (positive, negative))
    return (up.to(dtype) - down.to(dtype)).masked_fill_(up & down, torch.nan)
