"""The inner optimizers' buffers (momenta, second moments) at an averaging of all workers."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.none import Dense
from accordion_bench.exchange.exchange import Exchange
from accordion_bench.optimizers.inner import Optimizers
from accordion_bench.plan import Ladder, TensorSpec
from accordion_bench.tensors.real_view import as_real

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
        stacked = [torch.stack([as_real(row[i][key]) for row in rows]) for i in holders]
        inner.axis.comm.ledger.paper_count(sum(x_W[0].numel() for x_W in stacked))
        for i, mean in zip(holders, inner.axis.comm.all_reduce_mean(stacked), strict=True):
            for row in rows:
                as_real(row[i][key]).copy_(mean)
    inner.axis.comm.clock.lap("exposed")


def exchange_of_buffers(inner: Optimizers, comm: Comm) -> Exchange:
    """An exchange that sends what an average of the buffers sends, for forecasts.

    Args:
        inner: the optimizers, after a step.
        comm: of the workers whose buffers would be averaged.
    """
    axis = inner.axis
    optimizer, params = (inner.of_replicas[0], axis.replicas[0]) if axis.replicas else (inner.common, axis.params)
    states = [(spec.name, optimizer.state.get(param, {})) for spec, param in zip(axis.specs, params, strict=True)]
    named = [(f"{name}.{key}", as_real(own[key])) for name, own in states for key in averaged(own)]
    specs = [TensorSpec(name, tuple(buffer.shape)) for name, buffer in named]
    exchange = Exchange(Dense(), specs, Ladder(), comm, axis.like)
    exchange.what = "buffer"
    return exchange
