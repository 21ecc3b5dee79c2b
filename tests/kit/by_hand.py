"""A benchmark run, and the same training written by hand with `ab.attach` or `ab.local`, in two processes."""

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab
from accordion_bench.comm.collectives import Comm
from accordion_bench.config.components import build_model
from accordion_bench.datasets.sampler import Sampler
from accordion_bench.options.instantiate import target
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.tensors.keyed_rng import key, seeded
from accordion_bench.training.trainer import Trainer
from tests.kit import composed

SMALL = ["dataset.subset=96", "batch_size=8", "workers=2", "device=cpu", "checkpoint.every=0"]


def joined(rank: int, store: str, workers: int = 2) -> None:
    """Join a gloo group, and use one thread."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers)


def bench(folder: Path, rank: int, *overrides: str, workers: int = 2) -> Trainer:
    """Return the trainer of a benchmark run after the run, with one worker in each process."""
    cfg = composed.cfg(*SMALL, f"paths.runs={folder}", *overrides)
    config = RunConfig.from_dict({**cfg, "workers": workers})
    run = RunFolder(folder / "run")
    run.path.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(config, Comm(1, workers, rank), run)
    trainer.fit()
    trainer.comm.barrier()
    return trainer


class Loop:
    """Training loop of a user's script: a model, an optimizer, data and a learning rate.

    Args:
        trainer: trainer of a benchmark run, which supplies the configuration.
        rank: rank of the process.
        optimizer: class of the optimizer; None = the configured one.
    """

    def __init__(self, trainer: Trainer, rank: int, optimizer: type | None = None) -> None:
        config = self.config = trainer.config
        self.rank, self.workers = rank, trainer.comm.workers
        dataset = trainer.data
        with seeded(key(config.seed, "model")):
            self.model = build_model(config.model, _built(config), "", "")
        options = {name: value for name, value in config.optimizer.items() if name != "_target_"}
        optimizer = optimizer or target(config.optimizer, "optimizer")
        self.optimizer = optimizer(self.model.parameters(), **options)
        self.data, self.task = dataset, trainer.task
        self.sampler = Sampler(trainer.sampler.size, self.workers, config.seed, trainer.sampler.sharding)
        self.schedule = trainer.position.schedule
        self.base_lr = trainer.position.base_lr
        self.steps = self.sampler.steps(config.largest_batch)

    @property
    def batch_size(self) -> int:
        """Number of samples of this rank per step."""
        given = self.config.batch_size
        return given[self.rank] if isinstance(given, list) else given

    def lr(self, epoch: float) -> float:
        return self.base_lr * self.schedule(epoch)

    def epoch(self, comm: Any, epoch: int, module: nn.Module | None = None, first: int = 0) -> None:
        """Train one epoch as a user would write it."""
        module = module or self.model
        self.sampler.begin_epoch(epoch, self.config.largest_batch)
        batches = (self.sampler.batch(self.rank, step) for step in range(first, self.steps))
        for step, (x, y) in enumerate(self.data.train_batches(epoch, batches), first):
            for group in self.optimizer.param_groups:
                group["lr"] = self.lr(epoch + step / self.steps)
            loss = F.cross_entropy(module(x), y)
            comm.note(loss)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def train(self, comm: Any, module: nn.Module | None = None) -> None:
        """Train all epochs."""
        self.model.train()
        for epoch in range(self.config.epochs):
            self.epoch(comm, epoch, module)
            if epoch + 1 < self.config.epochs or not comm.sync.local:
                comm.end_epoch(next_lr=self.lr(epoch + 1) if epoch + 1 < self.config.epochs else self.lr(epoch))

    def attached(
        self, compressor: str, adaptive: Any = None, ddp: bool = False, **options: Any
    ) -> tuple[Any, nn.Module]:
        """Return the attachment, and the module to call."""
        module = DistributedDataParallel(self.model) if ddp else self.model
        comm = ab.attach(module, self.optimizer, compressor, adaptive, batch_size=self.batch_size, **options)
        return comm, module


def _built(config: RunConfig) -> Any:
    from accordion_bench.options.instantiate import build

    return build(config.dataset, "dataset")


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def differs(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Return the largest difference of any coordinate."""
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


@contextlib.contextmanager
def in_group(rank: int, store: str, workers: int = 2):
    joined(rank, store, workers)
    try:
        yield
    finally:
        dist.destroy_process_group()
