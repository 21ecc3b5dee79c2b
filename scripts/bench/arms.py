"""Arms that benches compare: our step, and the step of a plain PyTorch loop, on the same batches.

Both are timed under the settings of a run: freed memory is kept, and cuDNN's search is on. The settings apply to the
whole process.
"""

import contextlib
import tempfile
from collections.abc import Callable

import torch
import torch.nn.functional as F

from accordion_bench.comm.collectives import Comm
from accordion_bench.config.compose import compose
from accordion_bench.processes.machine import run_settings
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer

_settings = contextlib.ExitStack()


def as_a_run(device: str = "cpu") -> None:
    """Apply the settings of a run to the rest of this process, for our code and the compared code."""
    _settings.enter_context(run_settings(device))


def trainer_for(overrides: list[str], comm: Comm) -> Trainer:
    """Return a trainer in the middle of its first epoch, with files only in a temporary folder."""
    as_a_run(comm.device.type)
    cfg = compose([*overrides, "schedule.lr_scaling=none", "optimizer.lr=0.01"])
    trainer = Trainer(RunConfig.from_dict(cfg), comm, RunFolder(tempfile.mkdtemp()))
    trainer.begin_epoch()
    return trainer


def our_step(trainer: Trainer) -> Callable[[], None]:
    """Return one step of this project, its data included."""

    def step() -> None:
        if trainer.position.step_in_epoch >= trainer.position.steps_per_epoch - 1:
            trainer.position.step_in_epoch = 0
            trainer.begin_epoch()
        with trainer.step.graphs.training():
            trainer.train_step()

    return step


def plain_step(
    trainer: Trainer,
    model: torch.nn.Module,
    aggregate: Callable[[], None] = lambda: None,
    connect: Callable[[torch.optim.Optimizer], object] = lambda optimizer: None,
) -> Callable[[], None]:
    """Return one step of a plain PyTorch loop, on the same batches.

    Args:
        trainer: trainer whose data and order of samples the loop uses, as the worker of this process.
        model: model that is trained.
        aggregate: function that is applied to the gradients before the optimizer's step.
        connect: function that is applied to the optimizer before the first step.
    """
    optimizer = plain_optimizer(trainer, model)
    model.train()
    connect(optimizer)
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        indices = trainer.sampler.batch(trainer.comm.rank, count % (trainer.position.steps_per_epoch - 1))
        x, y = trainer.data.train_batch(indices)
        optimizer.zero_grad()
        logits = model(x)
        F.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
        aggregate()
        optimizer.step()

    return step


def plain_optimizer(trainer: Trainer, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the usual optimizer: torch's own AdamW, with decay on matrices only, or SGD with momentum."""
    if not trainer.config.optimizer["_target_"].endswith(".AdamW"):
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    own = list(model.parameters())
    matrices, others = [p for p in own if p.ndim > 1], [p for p in own if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
