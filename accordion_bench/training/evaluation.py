"""Evaluation: the consensus model on the test data, shared out among the workers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.worker_axis import WorkerAxis
from accordion_bench.datasets.base import Data
from accordion_bench.datasets.sampler import Sampler
from accordion_bench.forward.task import Task
from accordion_bench.position import Position
from accordion_bench.tensors.keyed_rng import kept_rng

RECOMPUTE_BATCHES = 128


@torch.no_grad()
def evaluate(
    axis: WorkerAxis, values: Sequence[Tensor], task: Task[Any], data: Data, sampler: Sampler, position: Position
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Evaluation columns of a consensus model, and the buffers that the first local worker has evaluated with.

    Training state stays as it is.

    Args:
        axis: the model, and the buffers of the workers.
        values: the consensus, [...] per parameter.
        task: says what is computed.
        data, sampler: training batches re-estimate BatchNorm's statistics where `axis.bn` is `recompute`.
        position: where training stands.
    """
    comm, kept = axis.comm, None
    if axis.bn == "recompute" and axis.buffers_W:
        count = min(RECOMPUTE_BATCHES, position.step_in_epoch)
        rows = range(comm.local_workers)
        # worker by worker, unlike training
        order = (sampler.batch(comm.first_worker + row, batch) for row in rows for batch in range(count))
        batches = data.train_batches(position.epoch, order)

        def forward(row: int, batch: int) -> None:
            axis.seed_dropout("recompute", position.step, row, batch)
            axis.model(next(batches)[0])

        with kept_rng(comm.device):
            kept = axis.recompute_buffers(values, forward, count)
    axis.model.eval()
    totals, evaluated_with = [], axis.consensus_buffers()
    for row, buffers in enumerate(evaluated_with):
        axis.evaluate_with(values, buffers)
        share = task.totals(axis.model, data, comm.first_worker + row, comm.workers)
        totals.append(share.to(comm.device))
    if kept is not None:
        axis.restore(kept)
    axis.evaluate_with(axis.shared, {})
    return task.columns(comm.sum_(torch.stack(totals).sum(0), "eval").tolist()), evaluated_with[0]
