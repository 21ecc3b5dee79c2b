"""Evaluation: the consensus model on the test data, shared out among the workers."""

from typing import TYPE_CHECKING

import torch

from accordion_bench.tensors.keyed_rng import kept_rng

if TYPE_CHECKING:
    from accordion_bench.training.trainer import Trainer

RECOMPUTE_BATCHES = 128


@torch.no_grad()
def evaluate(trainer: "Trainer") -> dict[str, float]:
    """Evaluation columns of a trainer's consensus model; training state stays as it is."""
    axis, comm = trainer.axis, trainer.comm
    kept, values = None, trainer.sync.consensus(trainer)
    if axis.bn == "recompute" and axis.buffers_W:
        count = min(RECOMPUTE_BATCHES, trainer.step_in_epoch)
        rows = range(comm.local_workers)
        # worker by worker, unlike training
        order = (trainer.sampler.batch(comm.first_worker + row, batch) for row in rows for batch in range(count))
        batches = trainer.data.train_batches(trainer.epoch, order)

        def forward(row: int, batch: int) -> None:
            axis.seed_dropout("recompute", trainer.step, row, batch)
            axis.model(next(batches)[0])

        with kept_rng(trainer.device):
            kept = axis.recompute_buffers(values, forward, count)
    axis.model.eval()
    totals = []
    for row, buffers in enumerate(axis.consensus_buffers()):
        axis.evaluate_with(values, buffers)
        share = trainer.task.totals(axis.model, trainer.data, comm.first_worker + row, comm.workers)
        totals.append(share.to(trainer.device))
    if kept is not None:
        axis.buffers_W = kept
    axis.evaluate_with(axis.shared, {})
    return trainer.task.columns(comm.sum_(torch.stack(totals).sum(0), "eval").tolist())
