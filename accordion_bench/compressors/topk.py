"""TopK: the largest entries of each tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from accordion_bench import check
from accordion_bench.comm import Comm
from accordion_bench.compressors import wire
from accordion_bench.compressors.base import Compressor, Context, Exchanged, State, dense_bytes
from accordion_bench.plan import TensorSpec


class TopK(Compressor):
    """update = mean_w TopK(g_w): of each tensor the k = density x numel entries of largest magnitude.

    The message is k fp32 values and their indices in the smaller code of `wire`, carried by an all-gather. Where that
    would cost more wire than a dense all-reduce, the sparsified tensor goes by dense all-reduce: same result.

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
        """Values and index code of one worker's sparse message."""
        k = self.kept(spec, level)
        return 4 * k + wire.index_bytes(spec.numel, k)[1]

    def gathers(self, spec: TensorSpec, level: float, workers: int) -> bool:
        """Whether the sparse message costs less wire than a dense all-reduce: (A-1) payload < 2 (A-1)/A 4n."""
        return self.message_bytes(spec, level) * max(workers, 2) < 8 * spec.numel

    def compresses(self, spec: TensorSpec, level: float | None) -> bool:
        return level is not None

    def payload_bytes(self, spec: TensorSpec, level: float | None, workers: int) -> int:
        if level is None or not self.gathers(spec, level, workers):
            return dense_bytes(spec)
        return self.message_bytes(spec, level)

    def exchange(self, xs_W: Sequence[Tensor], ctx: Context, state: State, comm: Comm) -> Exchanged:
        levels = {i: level for i, level in enumerate(ctx.levels) if level is not None}
        gathered = [i for i, level in levels.items() if self.gathers(ctx.specs[i], level, comm.workers)]
        reduced = [i for i in range(len(xs_W)) if i not in set(gathered)]
        indices_W = {i: top_indices(xs_W[i].flatten(1), self.kept(ctx.specs[i], levels[i])) for i in levels}
        values_W = {i: xs_W[i].flatten(1).gather(1, indices_W[i]).float() for i in levels}

        def sparsified_W(i: int) -> Tensor:
            if i not in indices_W:
                return xs_W[i]
            values = values_W[i].to(xs_W[i].dtype)
            return xs_W[i].new_zeros(xs_W[i].flatten(1).shape).scatter_(1, indices_W[i], values).view_as(xs_W[i])

        update: list[Tensor] = [xs_W[0]] * len(xs_W)
        means = comm.all_reduce_mean([sparsified_W(i) for i in reduced])
        for i, mean in zip(reduced, means, strict=True):
            update[i] = mean * comm.workers if self.reduce == "sum" and i in indices_W else mean

        parts_W = [
            part
            for i in gathered
            for part in (values_W[i].view(torch.uint8), wire.encode_indices(indices_W[i], ctx.specs[i].numel))
        ]
        sizes = [part.shape[1] for part in parts_W]
        if gathered:
            message_W = torch.cat(parts_W, dim=1)
            message_A = comm.all_gather(message_W) if sum(sizes) else message_W.new_empty(comm.workers, 0)
            received = iter(message_A.split(sizes, dim=1))
            for i in gathered:
                update[i] = self._decode(next(received), next(received), ctx.specs[i], xs_W[i])
        def subtract_sent_(i: int, target_W: Tensor) -> None:
            if i in indices_W:
                flat_W = target_W.view(target_W.shape[0], -1)
                flat_W.scatter_add_(1, indices_W[i], -values_W[i].to(target_W.dtype))
            else:
                target_W.sub_(xs_W[i])

        return Exchanged(update, subtract_sent_)

    def _decode(self, values: Tensor, codes: Tensor, spec: TensorSpec, like: Tensor) -> Tensor:
        if not values.numel():
            return like.new_zeros(spec.shape)
        values_A = values.clone(memory_format=torch.contiguous_format).view(torch.float32).to(like.dtype)
        indices_A = wire.decode_indices(codes, spec.numel, values_A.shape[1])
        total = like.new_zeros(spec.numel)
        for worker_values, worker_indices in zip(values_A, indices_A, strict=True):
            total.index_add_(0, worker_indices, worker_values)  # one worker at a time: a fixed order of summation
        return (total if self.reduce == "sum" else total / len(values_A)).view(spec.shape)


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
