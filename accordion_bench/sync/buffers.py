"""The inner optimizers' buffers (momenta, second moments) at an averaging of all workers."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from accordion_bench.optimizers.inner import Optimizers

BUFFERS = ("keep", "reset", "average")


def treat_buffers(inner: Optimizers, policy: str, rows: Iterable[int] | None = None) -> None:
    """Keep, reset (Adam's count of steps, too) or average them.

    Args:
        inner: the optimizers.
        policy: one of `BUFFERS`.
        rows: the local workers whose buffers are kept or reset, where not all have averaged.
    """
    if policy == "reset":
        for row in range(len(inner.of_replicas)) if rows is None else rows:
            inner.of_replicas[row].state.clear()
    elif policy == "average":
        average_buffers(inner)


def averaged(state: Mapping[str, Any]) -> list[str]:
    """Which buffers of one parameter have a mean."""
    return [key for key, value in state.items() if isinstance(value, Tensor) and key != "step"]


@torch.no_grad()
def average_buffers(inner: Optimizers) -> None:
    """Replace every buffer by its mean over all workers, sent as it is; counts of steps stay."""
    rows = [
        [optimizer.state.get(x, {}) for x in replica]
        for optimizer, replica in zip(inner.of_replicas, inner.axis.replicas, strict=True)
    ]
    # an optimizer may keep other buffers of one parameter than of another
    held = [(i, key) for i, own in enumerate(rows[0]) for key in averaged(own)]
    for key in dict.fromkeys(key for _, key in held):
        holders = [i for i, its in held if its == key]
        stacked = [torch.stack([row[i][key] for row in rows]) for i in holders]
        inner.axis.comm.ledger.paper_count(sum(x_W[0].numel() for x_W in stacked))
        for i, mean in zip(holders, inner.axis.comm.all_reduce_mean(stacked), strict=True):
            for row in rows:
                row[i][key].copy_(mean)
    inner.axis.comm.clock.lap("exposed")
