"""BatchNorm statistics, and whatever else is a buffer, pooled over all workers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm


@torch.no_grad()
def pooled_buffers(buffers_W: Mapping[str, Tensor], comm: Comm, between: bool = True) -> dict[str, Tensor]:
    """Mean over all workers, charged to `eval`; what is no number with a fraction stays the first local worker's.

    Args:
        buffers_W: by name, [W, ...].
        comm: of all workers.
        between: a variance also gets the variance of the workers' means.
    """
    pooled = {name: buffer_W[0].clone() for name, buffer_W in buffers_W.items()}
    floats = [name for name, buffer in pooled.items() if buffer.is_floating_point()]
    variances = [name for name in floats if name.endswith("running_var")] if between else []
    means_of = {name: name.removesuffix("var") + "mean" for name in variances}
    parts = [buffers_W[name].double().sum(0) for name in floats]
    parts += [buffers_W[means_of[name]].double().square().sum(0) for name in variances]
    if not parts:
        return pooled
    total = comm.sum_(torch.cat([part.reshape(-1) for part in parts]), "eval") / comm.workers
    averages = [
        value.view(part.shape) for value, part in zip(total.split([p.numel() for p in parts]), parts, strict=True)
    ]
    mean = dict(zip(floats, averages, strict=False))
    for name, square in zip(variances, averages[len(floats) :], strict=True):
        mean[name] = mean[name] + square - mean[means_of[name]].square()
    for name, value in mean.items():
        pooled[name].copy_(value)
    return pooled
