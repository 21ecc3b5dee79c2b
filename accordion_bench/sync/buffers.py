"""The inner optimizers' buffers (momenta, second moments) at an averaging of all workers."""

import torch
from torch import Tensor

from accordion_bench.optimizers.inner import Optimizers

BUFFERS = ("keep", "reset", "average")


def treat_buffers(inner: Optimizers, policy: str) -> None:
    """Keep, reset (Adam's count of steps, too) or average them."""
    if policy == "reset":
        for optimizer in inner.of_replicas:
            optimizer.state.clear()
    elif policy == "average":
        average_buffers(inner)


@torch.no_grad()
def average_buffers(inner: Optimizers) -> None:
    """Replace every buffer by its mean over all workers, sent as it is; counts of steps stay."""
    rows = [
        [optimizer.state.get(x, {}) for x in replica]
        for optimizer, replica in zip(inner.of_replicas, inner.axis.replicas, strict=True)
    ]
    keys = [key for key, value in rows[0][0].items() if isinstance(value, Tensor) and key != "step"]
    for key in keys:
        stacked = [torch.stack([row[i][key] for row in rows]) for i in range(len(rows[0]))]
        for i, mean in enumerate(inner.axis.comm.all_reduce_mean(stacked)):
            for row in rows:
                row[i][key].copy_(mean)
    inner.axis.comm.clock.lap("exposed")
