"""DeMo: decoupled momentum; each worker shares the largest DCT coefficients of a momentum of its own.

Tensor suffixes: W local workers, A all workers, G tensors of a group, C chunks of a tensor, N coefficients of a chunk,
K of them sent, B bytes.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from accordion_bench.codecs import index_codes
from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors import demo_on_device
from accordion_bench.compressors.base import Compressor, Context, Exchanged, Probe, State, WhyDense, dense_bytes, ring
from accordion_bench.compressors.dct import Chunks
from accordion_bench.compressors.gathered import non_finite
from accordion_bench.compressors.oneshot import rows_of
from accordion_bench.compressors.sparse_on_device import runs_on_device
from accordion_bench.compressors.traits import Traits
from accordion_bench.options import checks
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.same_shape import Blocks

VALUES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Group(NamedTuple):
    """Tensors of equal shape, by index; k coefficients of a chunk are sent, None = all."""

    ids: list[int]
    chunks: Chunks
    k: int | None


class Sent(NamedTuple):
    """What the workers send of a group: positions and values [W, G, C, K], or no positions and T d whole [W, G, C, N].

    Values are as the others decode them.
    """

    positions: Tensor | None
    values: Tensor


class DeMo(Compressor):
    """d_w <- decay d_w + lr g_w;  q_w = the k largest of T d_w, per chunk;  d_w <- d_w - T^-1 q_w;
    update = sign( T^-1 (mean of q_w over the workers that sent the coefficient) );  x <- x - lr update.

    T is the orthonormal DCT-II of chunks a x b: a is the largest divisor of the first dimension that is at most
    `chunk`, b that of the product of the others; 1-D tensors have vectors of a. d is the only momentum, and the
    residual too. The state holds T d: the same in exact arithmetic, and removing q_w is then k subtractions.

    A message is per chunk the k values in `value_dtype`, and their sorted positions in the smaller code of `wire`.
    Where that is not smaller than the chunk itself (k = all of it), d is sent whole, by all-reduce.

    Workers are summed in their order. An average over senders is not a sum that an all-reduce could carry: where an
    all-gather would cost more wire than a dense all-reduce (with the defaults from 200 workers on for chunks of
    64 x 64, from 4 on for vectors), each worker gets a share of the chunks by all-to-all, averages it, and answers with
    the signs, 2 bits per coordinate. The number of workers changes the bytes, never the training.

    Args:
        k: coefficients sent per chunk; lower k = more compression.
        decay: of d, in each step, in [0, 1].
        chunk: largest side of a chunk.
        value_dtype: of the coefficients on the wire: `float32`, `float16`, `bfloat16`. Their unit is that of lr x
            gradient; what float16 cannot express (below 6e-8, above 65,504) stays in d.

    Source: Peng, Quesnelle, Kingma 2024 (arXiv 2411.19870), Algorithm 1.
    """

    traits = Traits(
        knob="k",
        pair=(8, 32),
        reduces="other",
        collectives=("all_gather",),
        collective_reason="a coefficient is averaged over the workers that sent it, "
        "and that is not a sum over all workers",
        owns=frozenset({"momentum"}),
        weight_decay_mode="decoupled",
    )
    beside = {"optimizer": {"momentum": 0.0}}  # it has a momentum of its own

    def __init__(self, k: int = 32, decay: float = 0.999, chunk: int = 64, value_dtype: str = "float32") -> None:
        self.k = self.check_level("k", k)
        self.decay = checks.number("decay", decay, at_least=0, at_most=1, instead=0.999)
        self.chunk = checks.integer("chunk", chunk, at_least=1, instead=64)
        if self.k > self.chunk**2:
            raise checks.ValueRefused("k", f"at most {self.chunk**2}, the coefficients of a chunk", k, self.chunk**2)
        self.value_dtype = VALUES[checks.choice("value_dtype", value_dtype, list(VALUES))]

    def check_level(self, key, value) -> int:
        return checks.integer(key, value, at_least=1)

    # ---- bytes

    def chunks(self, spec: TensorSpec) -> Chunks:
        """How a tensor is cut."""
        return Chunks.of(spec, self.chunk)

    def chunk_bytes(self, chunks: Chunks, k: int) -> int:
        """B, the message of one chunk: k values and their positions."""
        return k * self.value_dtype.itemsize + index_codes.index_bytes(chunks.numel, k)[1]

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        if level is None or spec.numel == 0:
            return False
        chunks = self.chunks(spec)
        return level < chunks.numel and self.chunk_bytes(chunks, int(level)) < 4 * chunks.numel

    def why_dense(self, spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
        if not spec.numel or self.compresses(spec, level):
            return None
        return WhyDense(f"{level:g} values with their positions would be no smaller than a chunk", self._lower_knob())

    def gathers(self, chunks: Chunks, k: int, workers: int) -> bool:
        """Whether an all-gather costs less wire than a dense all-reduce: (A-1) B < 2 (A-1)/A 4N."""
        return self.chunk_bytes(chunks, k) * max(workers, 2) < 8 * chunks.numel

    def payload_bytes(self, spec: TensorSpec, level: float | None, workers: int) -> float:
        if level is None or not self.compresses(spec, level):
            return dense_bytes(spec)
        chunks, k = self.chunks(spec), int(level)
        answer = 0 if self.gathers(chunks, k, workers) else answer_bytes(chunks)
        return chunks.count * (self.chunk_bytes(chunks, k) + answer / workers)

    def wire_bytes(self, spec: TensorSpec, level: float | None, workers: int) -> float:
        if level is None or not self.compresses(spec, level):
            return ring(workers) * dense_bytes(spec)
        chunks, k = self.chunks(spec), int(level)
        if self.gathers(chunks, k, workers):
            return (workers - 1) * chunks.count * self.chunk_bytes(chunks, k)
        return ring(workers) / 2 * chunks.count * (self.chunk_bytes(chunks, k) + answer_bytes(chunks))

    # ---- one step

    def init(self, specs: Sequence[TensorSpec], comm: Comm, like: Tensor) -> State:
        cut = [TensorSpec(spec.name, (self.chunks(spec).count, self.chunks(spec).numel)) for spec in specs]
        deltas_W = Blocks(cut, comm.local_workers, like).tensors
        return {spec.name: {"delta_W": delta_W} for spec, delta_W in zip(specs, deltas_W, strict=True)}

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        if runs_on_device(xs_W):

            def by_owners(positions_W: Tensor, values_W: Tensor, chunks: Chunks, k: int) -> Tensor:
                message_W = self._pack(Sent(positions_W, values_W), chunks)
                return self._by_owners(message_W, Group([], chunks, k), values_W.dtype, comm)

            return demo_on_device.exchange(self, xs_W, ctx, state, comm, by_owners)
        by_shape: dict[tuple[tuple[int, ...], float | None], list[int]] = {}
        for i, (spec, level) in enumerate(zip(ctx.specs, ctx.levels, strict=True)):
            by_shape.setdefault((spec.shape, level if self.compresses(spec, level) else None), []).append(i)
        groups = [
            Group(ids, self.chunks(ctx.specs[ids[0]]), None if level is None else int(level))
            for (_, level), ids in by_shape.items()
        ]
        sent_W = [self._take(group, xs_W, ctx, state, comm) for group in groups]

        update: list[Tensor] = [xs_W[0]] * len(xs_W) if xs_W else []
        place: dict[int, tuple[int, int]] = {}
        for number, (group, signs) in enumerate(zip(groups, self._signs(groups, sent_W, comm), strict=True)):
            joined = group.chunks.joined(signs.view(len(group.ids), group.chunks.count, group.chunks.numel))
            for g, i in enumerate(group.ids):
                update[i] = joined[g].view(ctx.specs[i].shape)
                place[i] = number, g

        def subtract_sent_(targets_W: Mapping[int, Tensor]) -> None:
            for i, target_W in targets_W.items():
                number, g = place[i]
                (positions, values), chunks = sent_W[number], groups[number].chunks
                own_W = values[:, g]
                if positions is not None:
                    empty = values.new_zeros(len(values), chunks.count, chunks.numel)
                    own_W = empty.scatter_(2, positions[:, g], own_W)
                target_W.sub_(chunks.inverse(own_W).view(target_W.shape))

        return Exchanged(update, subtract_sent_)

    def _take(self, group: Group, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Sent:
        """Move d of a group's tensors, and take out of it what is to be sent."""
        W, (ids, chunks, k) = comm.local_workers, group
        deltas_W = [state[ctx.specs[i].name]["delta_W"] for i in ids]
        new_W = chunks.dct(rows_of([xs_W[i] for i in ids])).view(W, len(ids), chunks.count, chunks.numel)
        for g, (i, delta_W) in enumerate(zip(ids, deltas_W, strict=True)):
            delta_W.mul_(self.decay).add_(new_W[:, g], alpha=ctx.lrs[i])
        if k is None:
            whole = Sent(None, torch.stack(deltas_W, dim=1))
            torch._foreach_zero_(deltas_W)
            return whole
        rows = rows_of(deltas_W).reshape(-1, chunks.numel)
        # ascending, as `wire` needs them
        positions = rows.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
        values = rows.gather(1, positions)
        self._refuse_non_finite(values.view(W, len(ids), -1), ids, ctx, comm)
        limit = torch.finfo(self.value_dtype).max
        values = values.clamp_(-limit, limit).to(self.value_dtype).to(values.dtype)
        shape = (W, len(ids), chunks.count, k)
        positions_W, values_W = positions.view(shape), values.view(shape)
        for g, delta_W in enumerate(deltas_W):
            delta_W.scatter_add_(2, positions_W[:, g], -values_W[:, g])
        return Sent(positions_W, values_W)

    @staticmethod
    def _refuse_non_finite(values_W: Tensor, ids: Sequence[int], ctx: Context, comm: Comm) -> None:
        finite = values_W.isfinite().all(-1)
        if not finite.all():
            worker, g = (~finite).nonzero()[0].tolist()
            raise non_finite(ctx, ids[g], comm.first_named + worker)

    def _signs(self, groups: Sequence[Group], sent_W: Sequence[Sent], comm: Comm) -> list[Tensor]:
        """Per group the common signs, chunk by chunk: [G C, N]."""
        signs: list[Tensor] = [sent.values for sent in sent_W]
        whole = [i for i, group in enumerate(groups) if group.k is None]
        for i, mean in zip(whole, comm.all_reduce_mean([sent_W[i].values for i in whole]), strict=True):
            signs[i] = groups[i].chunks.chunks_from(mean).sign_()
        gathered: list[int] = []
        owned: dict[tuple[int, int, int], list[int]] = {}  # chunks of equal shape and k, whatever tensors they are of
        for i, (_, chunks, k) in enumerate(groups):
            if k is not None and self.gathers(chunks, k, comm.workers):
                gathered.append(i)
            elif k is not None:
                owned.setdefault((chunks.a, chunks.b, k), []).append(i)
        if gathered:
            messages_W = [self._pack(sent_W[i], groups[i].chunks).flatten(1) for i in gathered]
            message_A = comm.all_gather(torch.cat(messages_W, dim=1))
            parts = message_A.split([message_W.shape[1] for message_W in messages_W], dim=1)
            for i, part_A in zip(gathered, parts, strict=True):
                signs[i] = self._sign_of_mean(part_A, groups[i], sent_W[i].values.dtype)
        for ids in owned.values():
            messages_W = [self._pack(sent_W[i], groups[i].chunks) for i in ids]
            common = self._by_owners(torch.cat(messages_W, dim=1), groups[ids[0]], sent_W[ids[0]].values.dtype, comm)
            for i, part in zip(ids, common.split([message_W.shape[1] for message_W in messages_W]), strict=True):
                signs[i] = part
        return signs

    def _by_owners(self, message_W: Tensor, group: Group, dtype: torch.dtype, comm: Comm) -> Tensor:
        """Signs [C, N] of chunks with messages [W, C, B]: each worker averages its share of them for all."""
        cuts = [w * message_W.shape[1] // comm.workers for w in range(comm.workers + 1)]
        shares = list(itertools.pairwise(cuts))
        received = comm.all_to_all([message_W[:, start:stop].flatten(1) for start, stop in shares])
        answers = [pack_signs(self._sign_of_mean(message_A, group, dtype)) for message_A in received]
        sizes_A = [(stop - start) * answer_bytes(group.chunks) for start, stop in shares]
        return unpack_signs(torch.cat(comm.all_gather_uneven(answers, sizes_A)), group.chunks, dtype)

    def _pack(self, sent: Sent, chunks: Chunks) -> Tensor:
        """Messages [W, G C, B] of a group: per chunk values, then positions."""
        assert sent.positions is not None
        W, k = sent.values.shape[0], sent.values.shape[-1]
        values = sent.values.to(self.value_dtype).view(-1, k).view(torch.uint8)
        packed = torch.cat([values, index_codes.encode_indices(sent.positions.view(-1, k), chunks.numel)], dim=1)
        return packed.view(W, -1, packed.shape[1])

    def _sign_of_mean(self, message_A: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
        """Signs of some chunks [.., N] from all workers' messages [A, .. B]."""
        mean = group.chunks.chunks_from(self._mean_over_senders(message_A, group, dtype))
        return mean.sign_() if mean.device.type == "cpu" else demo_on_device.signs_of(mean)

    def _mean_over_senders(self, message_A: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
        """Coefficients of some chunks [.., N], each averaged over the workers that sent it."""
        (_, chunks, k), A = group, len(message_A)
        assert k is not None
        rows, end = message_A.reshape(-1, self.chunk_bytes(chunks, k)), k * self.value_dtype.itemsize
        # a clone, because contiguous() leaves a single row at an offset and stride that are no multiple of 4
        sent = rows[:, :end].clone(memory_format=torch.contiguous_format).view(self.value_dtype)
        values_A = sent.to(dtype).view(A, -1, k)
        positions_A = index_codes.decode_indices(rows[:, end:].contiguous(), chunks.numel, k).view(A, -1, k)
        if rows.device.type != "cpu":
            return demo_on_device.averaged(positions_A, values_A, chunks.numel)
        senders = torch.zeros(values_A.shape[1], chunks.numel, dtype=dtype, device=rows.device)
        for positions in positions_A:
            senders.scatter_add_(1, positions, torch.ones_like(values_A[0]))
        mean = torch.zeros_like(senders)
        for positions, values in zip(positions_A, values_A, strict=True):
            mean.scatter_add_(1, positions, values / senders.gather(1, positions))
        return mean

    def fed(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> list[Tensor]:
        """decay d + lr g."""
        moved_W = []
        for spec, x_W, lr in zip(ctx.specs, xs_W, ctx.lrs, strict=True):
            d_W = self.chunks(spec).inverse(state[spec.name]["delta_W"]).view(x_W.shape)
            moved_W.append(self.decay * d_W + lr * x_W)
        return moved_W

    @torch.no_grad()
    def probe_fed(self, xs_W: Sequence[Tensor], ctx: Context, state: State, workers: int) -> Probe:
        empty = {spec.name: {"delta_W": torch.zeros_like(state[spec.name]["delta_W"])} for spec in ctx.specs}
        return super().probe_fed(xs_W, replace(ctx, lrs=[1.0] * len(xs_W)), empty, workers)


def answer_bytes(chunks: Chunks) -> int:
    """Size of the signs of one chunk."""
    return 2 * ((chunks.numel + 7) // 8)


def pack_signs(signs: Tensor) -> Tensor:
    """-1, 0, 1 [C, N] as bytes [C answer_bytes]: which are positive, which are negative."""
    up, down = signs > 0, signs < 0
    if signs.device.type != "cpu":  # where nobody has looked; as both
        nan = signs.isnan()
        up, down = up | nan, down | nan
    return torch.cat([index_codes.pack_bits(up), index_codes.pack_bits(down)], dim=1).flatten()


def unpack_signs(message: Tensor, chunks: Chunks, dtype: torch.dtype) -> Tensor:
    """The inverse of `pack_signs`: [C, N]."""
    positive, negative = message.view(-1, answer_bytes(chunks)).chunk(2, dim=1)
    up, down = (index_codes.unpack_bits(bits.contiguous(), chunks.numel) for bits in (positive, negative))
    signs = up.to(dtype) - down.to(dtype)
    return signs if signs.device.type == "cpu" else signs.masked_fill_(up & down, torch.nan)
