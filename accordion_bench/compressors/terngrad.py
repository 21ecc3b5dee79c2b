"""TernGrad: three levels and one scale per tensor, shared by all workers."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors import packed_codes
from accordion_bench.compressors.base import (
    Compressor,
    Context,
    Exchanged,
    NonFinite,
    State,
    WhyDense,
    dense_bytes,
    ring,
)
from accordion_bench.compressors.chunks import chunks_of
from accordion_bench.compressors.dense_codes import Batch, Dense, DenseCodes, rounded, scaled_, values_of
from accordion_bench.compressors.entropy import check_entropy
from accordion_bench.compressors.oneshot import rows_of
from accordion_bench.compressors.rounding.norms import bucket_norms
from accordion_bench.compressors.rounding.stochastic import encode_levels
from accordion_bench.compressors.rounding.sums import add_levels_
from accordion_bench.compressors.traits import Traits
from accordion_bench.options import checks
from accordion_bench.options.units import counted
from accordion_bench.plan import TensorSpec
from accordion_bench.tensors.counter_rng import BLOCK

TERNARY = (-1.0, 0.0, 1.0)


class TernaryCodes(DenseCodes):
    """Coordinates rounded at random to -s, 0 or s, those beyond s to that: codes alone, five to a byte.

    Args:
        scales: s per tensor name, 0-dimensional; known to everybody.
        entropy: see `Quantiser`.
    """

    by_name = True

    def __init__(self, scales: dict[str, Tensor], entropy: str) -> None:
        self.scales, self.entropy = scales, entropy

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return packed_codes.code_bytes(spec.numel, len(TERNARY))

    def encode_rows(self, xs_W: Sequence[Tensor], ctx: Context, ids: Sequence[int], level: float, comm: Comm) -> Tensor:
        x_R = rows_of([xs_W[i] for i in ids])
        scale_R = torch.stack([self.scales[ctx.specs[i].name] for i in ids]).repeat(comm.local_workers)
        keys = [self.keys(ctx, ctx.specs[i].name, [worker])[0] for worker in comm.local for i in ids]
        message_R = encode_levels(x_R, scale_R[:, None], None, TERNARY, keys)
        return message_R.unflatten(0, (comm.local_workers, len(ids)))

    def dense(self, level: float, ctx: Context) -> Dense | None:
        return Dense((len(TERNARY),), header=False)

    def encode_chunks(self, x_W: Tensor, blocks_W: Tensor, batch: Batch) -> tuple[Tensor | None, list[Tensor]]:
        scales = torch.stack([self.scales[name] for name in batch.names])
        return None, [rounded(x_W, scales.expand(len(x_W), -1), batch.chunks, TERNARY, blocks_W)]

    def decode_chunks(self, header_A: Tensor, codes_A: Sequence[Tensor], batch: Batch) -> Tensor:
        scales = torch.stack([self.scales[name] for name in batch.names])
        return scaled_(values_of(codes_A[0], TERNARY, batch.chunks), scales[None], batch.chunks)

    def codes_of(
        self, message_A: Tensor, spec: TensorSpec, level: float, ctx: Context
    ) -> tuple[Tensor, Sequence[float]]:
        return packed_codes.unpack_codes(message_A.contiguous(), len(TERNARY), spec.numel), TERNARY

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        scale_A = (self.scales[spec.name] * alpha).expand(len(message_AR), 1).contiguous()
        for total, message_A in zip(total_R, message_AR.unbind(1), strict=True):
            add_levels_(total, message_A, scale_A, None, TERNARY)


class TernGrad(Compressor):
    """C(v)_i = s sgn(v_i) with probability |v_i| / s, else 0;  s = max over workers of min(max |v_w|, clip sigma_w).

    Unbiased, but for what is cut at s. The scale is shared by an all-reduce of 4 bytes per tensor, so that a worker's
    message is codes alone. Tensors for which that would cost more wire than a dense all-reduce travel dense, unrounded.

    Args:
        clip: s is at most this many standard deviations sigma_w of a worker's tensor, which keeps the noise small, at
            the price of a bias; null = no clipping.
        entropy: see `Quantiser`.

    The paper cuts each worker's tensor at its own clip sigma_w before the scale is shared; here all are cut at s, which
    is never less. Source: Wen et al. 2017 (arXiv 1705.07878).
    """

    traits = Traits(
        whole_model=True,
        collectives=("all_gather",),
        collective_reason="all workers share one scale, with which an owner's mean could not be told from a code",
    )
    draws = "worker"

    def __init__(self, clip: float | None = 2.5, entropy: str = "none") -> None:
        self.clip = None if clip is None else checks.number("clip", clip, above=0, instead=2.5)
        self.traits = replace(self.traits, unbiased=clip is None)
        self.entropy = check_entropy(entropy)

    def pays(self, spec: TensorSpec, workers: int) -> bool:
        """Whether codes and scale cost less wire than dense: (A-1) B + 2 (A-1)/A 4 < 2 (A-1)/A 4n."""
        return packed_codes.code_bytes(spec.numel, len(TERNARY)) * max(workers, 2) + 8 < 8 * spec.numel

    def why_dense(self, spec: TensorSpec, level: float, workers: int) -> WhyDense | None:
        if self.pays(spec, workers):
            return None
        reason = f"codes from {counted(workers, 'worker')}, gathered, would cost more than a dense all-reduce"
        return WhyDense(reason, "fewer workers")

    def payload_bytes(self, spec: TensorSpec, level: float | None, workers: int) -> float:
        if level is None or not self.pays(spec, workers):
            return dense_bytes(spec)
        return 4 + packed_codes.code_bytes(spec.numel, len(TERNARY))

    def wire_bytes(self, spec: TensorSpec, level: float | None, workers: int) -> float:
        if level is None or not self.pays(spec, workers):
            return ring(workers) * dense_bytes(spec)
        return ring(workers) * 4 + (workers - 1) * packed_codes.code_bytes(spec.numel, len(TERNARY))

    def largest_of(self, xs_W: Sequence[Tensor]) -> list[Tensor]:
        """min(max |v_w|, clip sigma_w) of the local workers, the largest of them, for each tensor."""
        if not xs_W or xs_W[0].device.type == "cpu" or xs_W[0].dtype != torch.float32:
            return [self.largest(x_W) for x_W in xs_W]
        lengths = tuple(x_W[0].numel() for x_W in xs_W)
        chunks = chunks_of(lengths, BLOCK, None, xs_W[0].device)
        x_W = chunks.joined([x_W.flatten(1) for x_W in xs_W])
        largest_W = chunks.norms(x_W, math.inf)
        if self.clip is not None:
            sum_W = chunks.by_bucket(x_W.sum(2, keepdim=True, dtype=torch.float64)).sum(2)
            spread_W = chunks.norms(x_W, 2).square() - sum_W.square() / chunks.entries
            sigma_W = (spread_W.clamp_min(0) / (chunks.entries - 1).clamp_min(1)).sqrt()
            largest_W = torch.where(sigma_W > 0, torch.minimum(largest_W, self.clip * sigma_W), largest_W)
        return list(largest_W.amax(0).float())

    def largest(self, x_W: Tensor) -> Tensor:
        """The same of one tensor."""
        rows_W = x_W.flatten(1)
        largest_W = bucket_norms(rows_W, None, "linf")[:, 0]
        n = rows_W.shape[1]
        if self.clip is not None and n > 1:
            square_W = bucket_norms(rows_W, None, "l2")[:, 0].double().square()
            sum_W = rows_W.sum(1).double()
            sigma_W = ((square_W - sum_W.square() / n).clamp_min(0) / (n - 1)).sqrt()
            # all entries alike have no sigma: nothing sticks out, nothing is cut
            largest_W = torch.where(sigma_W > 0, torch.minimum(largest_W, self.clip * sigma_W.float()), largest_W)
        return largest_W.amax()

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        specs = ctx.specs
        sent = [i for i, level in enumerate(ctx.levels) if level is not None and self.pays(specs[i], comm.workers)]
        shared = comm.all_reduce_max(self.largest_of([xs_W[i] for i in sent]))
        for i, scale in zip(sent, shared, strict=True):
            if comm.device.type == "cpu" and not scale.isfinite():
                raise NonFinite(f"what some worker was to send of {specs[i].name} is not finite")
        scales = {specs[i].name: scale for i, scale in zip(sent, shared, strict=True)}
        narrowed = replace(ctx, levels=[1 if i in set(sent) else None for i in range(len(specs))])
        return TernaryCodes(scales, self.entropy).exchange(xs_W, narrowed, state, comm)
