"""The inner optimizers' buffers (momenta, second moments) at an averaging of all workers."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from accordion_bench.training.trainer import Trainer

BUFFERS = ("keep", "reset", "average")


def treat_buffers(trainer: "Trainer", policy: str) -> None:
    """Keep, reset (Adam's count of steps, too) or average them."""
    if policy == "reset":
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
    elif policy == "average":
        average_buffers(trainer)


@torch.no_grad()
def average_buffers(trainer: "Trainer") -> None:
    """Replace every buffer by its mean over all workers, sent as it is; counts of steps stay."""
    rows = [
        [optimizer.state.get(x, {}) for x in replica]
        for optimizer, replica in zip(trainer.optimizers, trainer.axis.replicas, strict=True)
    ]
    keys = [key for key, value in rows[0][0].items() if isinstance(value, Tensor) and key != "step"]
    for key in keys:
        stacked = [torch.stack([row[i][key] for row in rows]) for i in range(len(rows[0]))]
        for i, mean in enumerate(trainer.comm.all_reduce_mean(stacked)):
            for row in rows:
                row[i][key].copy_(mean)
    trainer.clock.lap("exposed")
