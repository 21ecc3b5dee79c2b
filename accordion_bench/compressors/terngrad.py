"""TernGrad: three levels and one scale per tensor, shared by all workers."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from accordion_bench import check
from accordion_bench.comm import Comm
from accordion_bench.compressors import codes, levels
from accordion_bench.compressors.base import Compressor, Context, Exchanged, State, dense_bytes
from accordion_bench.compressors.entropy import check_entropy
from accordion_bench.compressors.oneshot import OneShot
from accordion_bench.plan import TensorSpec

TERNARY = (-1.0, 0.0, 1.0)


class TernaryCodes(OneShot):
    """Coordinates in [-1, 1] rounded at random to -1, 0 or 1: codes alone, five to a byte."""

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return codes.code_bytes(spec.numel, len(TERNARY))

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        return levels.encode_levels(x_R, torch.ones(len(x_R), 1, device=x_R.device), None, TERNARY, keys)

    def decode(self, message_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
        rows_R = torch.zeros(len(message_R), spec.numel, device=message_R.device)
        self.add_decoded_(rows_R, message_R[None], spec, level, ctx)
        return rows_R

    def codes_of(
        self, message_A: Tensor, spec: TensorSpec, level: float, ctx: Context
    ) -> tuple[Tensor, Sequence[float]]:
        return codes.unpack_codes(message_A.contiguous(), len(TERNARY), spec.numel), TERNARY

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        scale_A = torch.full((len(message_AR), 1), alpha, device=total_R.device)
        for total, message_A in zip(total_R, message_AR.unbind(1), strict=True):
            levels.add_levels_(total, message_A, scale_A, None, TERNARY)


class TernGrad(Compressor):
    """C(v)_i = s sgn(v_i) with probability |v_i| / s, else 0;  s = max over all workers and entries of |v|.

    Unbiased, but for what is clipped. The scale is shared by an all-reduce of 4 bytes per tensor, so that a worker's
    message is codes alone. Tensors for which that would cost more wire than a dense all-reduce travel dense, unrounded.

    Args:
        clip: entries beyond this many standard deviations of their tensor are cut to that first, which keeps the scale
            and with it the noise small, at the price of a bias; null = no clipping.
        entropy: see `Quantiser`.

    Source: Wen et al. 2017 (arXiv 1705.07878).
    """

    whole_model = True
    collectives = ("all_gather",)
    because = "all workers share one scale, with which an owner's mean could not be told from a code"

    def __init__(self, clip: float | None = 2.5, entropy: str = "none") -> None:
        self.clip = None if clip is None else check.number("clip", clip, above=0, instead=2.5)
        self.unbiased = clip is None
        self.codes = TernaryCodes()
        self.codes.entropy = check_entropy(entropy)

    def pays(self, spec: TensorSpec, workers: int) -> bool:
        """Whether codes and scale cost less wire than dense: (A-1) B + 2 (A-1)/A 4 < 2 (A-1)/A 4n."""
        return self.codes.message_bytes(spec, 1) * max(workers, 2) + 8 < 8 * spec.numel

    def payload_bytes(self, spec: TensorSpec, level: float | None, workers: int) -> float:
        if level is None or not self.pays(spec, workers):
            return dense_bytes(spec)
        return 4 + self.codes.message_bytes(spec, 1)

    def clipped(self, x_W: Tensor) -> Tensor:
        """Each worker's tensor, cut at `clip` standard deviations of its own."""
        if self.clip is None or x_W[0].numel() < 2:
            return x_W
        limit_W = self.clip * x_W.flatten(1).std(dim=1).view(-1, *[1] * (x_W.ndim - 1))
        return x_W.clamp(-limit_W, limit_W)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        specs = ctx.specs
        sent = {i for i, level in enumerate(ctx.levels) if level is not None and self.pays(specs[i], comm.workers)}
        clipped_W = [self.clipped(x) if i in sent else x for i, x in enumerate(xs_W)]
        largest = [torch.stack(x.aminmax()).abs().amax().float() for i, x in enumerate(clipped_W) if i in sent]
        scales = dict(zip(sorted(sent), comm.all_reduce_max(largest), strict=True))
        unit_W = [x / scales[i].clamp_min(1e-38) if i in sent else x for i, x in enumerate(clipped_W)]
        narrowed = replace(ctx, levels=[1 if i in sent else None for i in range(len(specs))])
        out = self.codes.exchange(unit_W, narrowed, state, comm)

        def subtract_sent_(i: int, target_W: Tensor) -> None:
            if i in sent:
                minus_W = torch.zeros_like(target_W, memory_format=torch.contiguous_format)
                out.subtract_sent_(i, minus_W)
                target_W.addcmul_(minus_W, scales[i].to(target_W.dtype))
            else:
                target_W.sub_(xs_W[i])

        return Exchanged([u * scales[i] if i in sent else u for i, u in enumerate(out.update)], subtract_sent_)
