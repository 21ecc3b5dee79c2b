"""Small float64 runs of local methods, and the same in plain PyTorch with explicit lists."""

import copy
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from accordion_bench.comm.collectives import Comm
from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import checkpoint
from accordion_bench.runs.folder import RunFolder
from accordion_bench.schedules.learning_rate import MultiStep
from accordion_bench.tensors import keyed_rng
from accordion_bench.tensors.keyed_rng import draw_distinct
from accordion_bench.training.trainer import Trainer
from tests.kit import by_hand, tiny
from tests.kit.processes import together

SMOOTH = ["model._target_=tests.kit.local.Smooth", "schedule.warmup_epochs=0"]
PLAIN_SGD = ["optimizer.momentum=0", "optimizer.weight_decay=0"]
CONSTANT = ["schedule.milestones=[]"]


class Smooth(nn.Module):
    """Two layers in float64; not quadratic, without kinks."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.a = nn.Linear(in_channels * 64, 6).double()
        self.b = nn.Linear(6, num_classes).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x.double().flatten(1))))


class Deep(nn.Module):
    """Four blocks between a first and a last layer, in float64."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(in_channels * 64, 6).double()
        self.blocks = nn.ModuleList(nn.Linear(6, 6).double() for _ in range(4))
        self.last = nn.Linear(6, num_classes).double()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x.to(self.first.weight).flatten(1)))
        for block in self.blocks:
            y = y + torch.tanh(block(y))
        return self.last(y)


class DeepFloat(Deep):
    """`Deep` in float32, the dtype in which bytes are counted."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(in_channels, num_classes)
        self.float()


class Sometimes(Smooth):
    """Net with a layer that about half of all batches do not reach."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(in_channels, num_classes)
        self.extra = nn.Linear(6, num_classes).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.a(x.double().flatten(1)))
        return self.b(hidden) + (self.extra(hidden) if x.mean() > 0 else 0)


class FromZero(MultiStep):
    """Schedule that is 0 in the first half epoch, which has 3 steps."""

    def __call__(self, epoch: float) -> float:
        return 0.0 if epoch < 0.5 else super().__call__(epoch)


class Cosine0(MultiStep):
    """Schedule that falls in every step, without a sudden drop."""

    def __call__(self, epoch: float) -> float:
        return 2 - epoch / self.epochs


@functools.cache
def _composed(chosen: tuple[str, ...]) -> dict:
    return tiny.cfg(Path("nowhere"), *chosen)


def cfg_for(tmp_path, *overrides: str) -> dict:
    """Return tiny.cfg with 4 epochs of 6 steps and 4 workers; the learning rate drops after 12 and 18 steps.

    Options are set directly, because composing takes longer than training.
    """
    pairs = dict(item.split("=", 1) for item in (*SMOOTH, *overrides))
    groups = {key: value for key, value in pairs.items() if (conf_dir() / key).is_dir()}
    cfg = copy.deepcopy(_composed(tuple(f"{key}={value}" for key, value in groups.items())))
    for key, value in {**pairs, "paths.runs": str(tmp_path)}.items():
        *path, last = key.split(".")
        node = functools.reduce(lambda inner, part: inner[part], path, cfg)
        if key not in groups:
            assert last in node, key
            node[last] = yaml.safe_load(value)
    if "nesterov" in cfg["optimizer"] and "optimizer.nesterov" not in pairs:
        cfg["optimizer"]["nesterov"] = False  # the twins have plain momentum, also if the scheme brings Nesterov's
    return cfg


def trainer_for(tmp_path, *overrides: str, workers: int = 4) -> Trainer:
    cfg = {**cfg_for(tmp_path, *overrides), "workers": workers}
    return Trainer(RunConfig.from_dict(cfg), Comm(workers), RunFolder.create(str(tmp_path), "run", cfg))


def trained(tmp_path, *overrides: str, workers: int = 4, watch: Callable | None = None) -> Trainer:
    """Return a trainer after its run; `watch` is called with the trainer after every step."""
    return fitted(trainer_for(tmp_path, *overrides, workers=workers), watch)


def fitted(trainer: Trainer, watch: Callable | None = None) -> Trainer:
    train_step = trainer.train_step

    def watched() -> None:
        train_step()
        if watch:
            watch(trainer)

    trainer.train_step = watched  # type: ignore[method-assign]
    trainer.fit()
    return trainer


def resumed(tmp_path, *overrides: str, steps: int = 5) -> Trainer:
    """Return a trainer after a run that was stopped after some steps and resumed from its checkpoint."""
    half = trainer_for(tmp_path / "half", *overrides)
    half.begin_epoch()
    for _ in range(steps):
        half.train_step()
    half.save()
    trainer = trainer_for(tmp_path / "again", *overrides)
    trainer.load(checkpoint.latest(half.folder.path))
    return fitted(trainer)


def _in_processes(rank: int, root: str, processes: int, runs: Sequence[Sequence[str]]) -> None:
    with by_hand.in_group(rank, f"{root}/store-{processes}", processes):
        for number, overrides in enumerate(runs):
            cfg = {**cfg_for(root, *overrides), "workers": 4}
            folder = RunFolder(Path(root) / f"run-{processes}-{number}")
            folder.path.mkdir(exist_ok=True)
            run = Trainer(RunConfig.from_dict(cfg), Comm(4 // processes, processes, rank), folder)
            run.fit()
            if not rank:
                torch.save([x.clone() for x in run.axis.shared], f"{root}/{processes}-{number}.pt")


def placed(root: Path, processes: int, *runs: Sequence[str]) -> list[list[Tensor]]:
    """Return the common parameters of four workers in so many processes after each run, given by its overrides."""
    together(processes, _in_processes, str(root), processes, runs)
    return [torch.load(root / f"{processes}-{number}.pt") for number in range(len(runs))]


def consensus(trainer: Trainer) -> list[Tensor]:
    return [value.clone() for value in trainer.sync.consensus()]


def replicas(trainer: Trainer) -> list[list[Tensor]]:
    return [[x.detach().clone() for x in own] for own in trainer.axis.replicas]


def all_equal(models: list[list[Tensor]]) -> bool:
    return all(torch.equal(a, b) for own in models[1:] for a, b in zip(own, models[0], strict=True))


def mean(models: list[list[Tensor]]) -> list[Tensor]:
    return [torch.stack([x.detach() for x in xs]).mean(0) for xs in zip(*models, strict=True)]


def deviation(a: list[Tensor], b: list[Tensor]) -> float:
    """Return the largest difference of any coordinate."""
    return max(float((x.detach() - y.detach()).abs().max()) for x, y in zip(a, b, strict=True))


def momenta(trainer: Trainer, row: int | None = None) -> list[Tensor]:
    """Return the momenta of the common optimizer, or of one replica's optimizer."""
    optimizer = trainer.inner.common if row is None else trainer.inner.of_replicas[row]
    own = trainer.axis.params if row is None else trainer.axis.replicas[row]
    return [optimizer.state[x]["momentum_buffer"] for x in own]


@torch.no_grad()
def assign(models: list[list[Tensor]], values: list[Tensor]) -> None:
    for own in models:
        for x, value in zip(own, values, strict=True):
            x.copy_(value)


@torch.no_grad()
def average_drawn(trainer: Trainer, models: list[list[Tensor]], share: float, step: int) -> None:
    """Average the drawn entries of a step, in place; steps are counted from 0."""
    numel = sum(spec.numel for spec in trainer.axis.specs)
    generator = keyed_rng.generator(trainer.runner.seed, "sparse average", step)
    drawn = draw_distinct(numel, int(share * numel), generator)
    rows = torch.stack([torch.cat([x.detach().flatten() for x in own]) for own in models])
    rows[:, drawn] = rows[:, drawn].mean(0)
    for own, row in zip(models, rows, strict=True):
        assign([own], [part.view_as(x) for part, x in zip(row.split([x.numel() for x in own]), own, strict=True)])


def twin(trainer: Trainer, after_step: Callable, kind=torch.optim.SGD, **optimizer) -> list[list[Tensor]]:
    """Repeat the run of a new trainer in plain PyTorch, with one model and one optimizer per worker.

    Args:
        trainer: a trainer before its first step, which is not changed.
        after_step: called with (steps taken, learning rate, models, optimizers); models are lists of parameters.
        kind: class of the inner optimizers.
        optimizer: options of the inner optimizers; for SGD, those that differ from the tiny run's.
    """
    options = {**({"momentum": 0.9, "weight_decay": 1e-4} if kind is torch.optim.SGD else {}), **optimizer}
    models = [copy.deepcopy(trainer.axis.model) for _ in range(trainer.comm.workers)]
    params = [list(model.parameters()) for model in models]
    optimizers = [kind(own, lr=1.0, **options) for own in params]
    taken = 0
    for epoch in range(trainer.config.epochs):
        trainer.sampler.begin_epoch(epoch, trainer.position.plan.batch_size)
        trainer.data.begin_epoch(epoch)
        for step in range(trainer.position.steps_per_epoch):
            lr = trainer.position.lr(step, epoch)
            for worker, (model, inner) in enumerate(zip(models, optimizers, strict=True)):
                x, y = trainer.data.train_batch(trainer.sampler.batch(worker, step))
                inner.zero_grad()
                F.cross_entropy(model(x), y).backward()
                for group in inner.param_groups:
                    group["lr"] = lr
                inner.step()
            taken += 1
            after_step(taken, lr, params, optimizers)
    return params
