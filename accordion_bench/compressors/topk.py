"""TopK: the largest entries of each tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench import check
from accordion_bench.comm import Comm
from accordion_bench.compressors import wire
from accordion_bench.compressors.base import Context, Exchanged, State
from accordion_bench.compressors.oneshot import OneShot
from accordion_bench.plan import TensorSpec


class TopK(OneShot):
    """update = mean_w TopK(g_w): of each tensor the k = density x numel entries of largest magnitude.

    The message is k fp32 values and their indices in the smaller code of `wire`.

    Args:
        density: share of entries kept, in (0, 1]; lower density = more compression.
        count: `at_least_one`: k = max(1, floor(density numel)); `floor`: k may be 0 (Accordion's code).
        reduce: `mean` over workers, or `sum` (Accordion's code: compressed tensors then see A times the learning rate).

    Ties go to the lower index. Source: Aji and Heafield 2017; Stich et al. 2018.
    """

    knob = "density"
    pair = (0.10, 0.99)
    min_ndim = 2
    whole_model = True
    because = "every worker keeps other entries, and a sum of sparse tensors is not sparse"

    def __init__(self, density: float = 0.1, count: str = "at_least_one", reduce: str = "mean") -> None:
        self.density = self.check_level("density", density)
        self.count = check.choice("count", count, ["at_least_one", "floor"])
        self.reduce = check.choice("reduce", reduce, ["mean", "sum"])
        self.reduces = "mean" if reduce == "mean" else "sum"

    def check_level(self, key, value) -> float:
        return check.number(key, value, above=0, at_most=1, instead=0.1)

    def kept(self, spec: TensorSpec, level: float) -> int:
        """k, the number of entries that one worker sends."""
        # 1e-9: a density such as 0.29 times 100 is 28.999999999999996 in floating point
        k = int(level * spec.numel + 1e-9)
        return max(1, k) if self.count == "at_least_one" else k

    def message_bytes(self, spec: TensorSpec, level: float) -> int:
        return wire.sparse_bytes(spec.numel, self.kept(spec, level))

    def encode(self, x_R: Tensor, spec: TensorSpec, level: float, ctx: Context, keys: Sequence[int]) -> Tensor:
        indices_R = top_indices(x_R, self.kept(spec, level))
        return wire.encode_sparse(indices_R, x_R.gather(1, indices_R).float(), spec.numel)

    def decode(self, message_R: Tensor, spec: TensorSpec, level: float, ctx: Context) -> Tensor:
        zeros_R = torch.zeros(len(message_R), spec.numel, device=message_R.device)
        return zeros_R.scatter_(1, *wire.decode_sparse(message_R, spec.numel, self.kept(spec, level)))

    def add_decoded_(
        self, total_R: Tensor, message_AR: Tensor, spec: TensorSpec, level: float, ctx: Context, alpha: float = 1.0
    ) -> None:
        for message_R in message_AR:  # one worker at a time: a fixed order of summation
            indices_R, values_R = wire.decode_sparse(message_R, spec.numel, self.kept(spec, level))
            total_R.scatter_add_(1, indices_R, (values_R * alpha).to(total_R.dtype))

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        out = super().exchange(xs_W, ctx, state, comm)
        if self.reduce == "mean":
            return out
        compressed = [self.compresses(spec, level) for spec, level in zip(ctx.specs, ctx.levels, strict=True)]
        update = [u * comm.workers if c else u for u, c in zip(out.update, compressed, strict=True)]
        return Exchanged(update, out.subtract_sent_)


def top_indices(rows_W: Tensor, k: int) -> Tensor:
    """Per row [W, N] the ascending indices [W, k] of the k largest magnitudes; ties go to the lower index."""
    if k in (0, rows_W.shape[1]):
        return torch.arange(k, device=rows_W.device).expand(rows_W.shape[0], k).contiguous()
    return torch.stack([_top_of_row(row, k) for row in rows_W])


def _top_of_row(row: Tensor, k: int) -> Tensor:
    magnitudes = row.abs()
    smallest = magnitudes.topk(k, sorted=False).values.min()
    chosen = (magnitudes >= smallest).nonzero()[:, 0]
    if len(chosen) > k:
        above, tied = (magnitudes > smallest).nonzero()[:, 0], (magnitudes == smallest).nonzero()[:, 0]
        chosen = torch.cat([above, tied[: k - len(above)]]).sort().values
    return chosen
