"""A network that trains in milliseconds, with faults that tests request through environment variables."""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

RUN = [
    "model=resnet18",
    "model._target_=tests.kit.tiny.Net",
    "dataset=synthetic",
    "dataset.size=8",
    "dataset.train_size=96",
    "dataset.test_size=16",
    "batch_size=4",
    "epochs=4",
    "schedule.warmup_epochs=1",
    "optimizer.lr=0.02",
    "comm=simulated",
    "checkpoint.every=0",  # saves time in tests that need no checkpoint
]
COMMAND = [sys.executable, "-m", "accordion_bench"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *COMMAND[1:]]
STEPS = 6  # per epoch, with 4 workers


def typed(runs: Path, *overrides: str) -> list[str]:
    """Return overrides for a run of a second or less; later ones replace earlier ones."""
    merged = {item.split("=")[0]: item for item in (*RUN, f"paths.runs={runs}", *overrides)}
    return list(merged.values())


def cfg(runs: Path, *overrides: str) -> dict:
    """Return the configuration that `config.compose` gives for `typed` of the same arguments."""
    from tests.kit import composed  # imports Hydra, which started processes do not need

    return composed.cfg(*typed(runs, *overrides))


def saving(every: int | None, **options: float | None) -> dict:
    """Return the options of checkpoints."""
    from accordion_bench.run_config import defaults

    return {**defaults()["checkpoint"], "every": every, **options}


def only(runs: Path) -> Path:
    """Return the only run folder."""
    (folder,) = folders(runs)
    return folder


def folders(runs: Path) -> list[Path]:
    """Return all run folders, without the `.multirun` and sweep.jsonl of a sweep."""
    return sorted(path for path in runs.iterdir() if path.is_dir() and not path.name.startswith("."))


class Net(nn.Module):
    """Convolutions of equal shapes, BatchNorm, dropout.

    Environment:
        TINY_TROUBLE=KIND:RANK:COUNT: fault in the COUNTth training forward of a rank: nan, gradient (infinite), raise,
            kill (the process itself), stop (SIGINT to the process that the user has started).
        TINY_STARTER=PID: process that the user has started, if it is not the parent.
        TINY_MODULES=FOLDER: each process writes the names of its modules there, in each training forward.
    """

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 8, 3, 2, 1, bias=False)
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.dropout, self.head = nn.BatchNorm2d(8), nn.Dropout(0.2), nn.Linear(8, num_classes)
        self.count = 0
        self.kind, self.rank, self.at = os.environ.get("TINY_TROUBLE", "none:0:0").split(":")

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.stem(x))
        y = y + self.b(F.relu(self.a(y)))
        y = self.head(self.dropout(F.relu(y).mean((2, 3))))
        return self.trouble(y) if self.training else y

    def trouble(self, y: Tensor) -> Tensor:
        self.count += 1
        if folder := os.environ.get("TINY_MODULES"):
            Path(folder, str(os.getpid())).write_text("\n".join(sys.modules))
        if self.count != int(self.at) or int(self.rank) != (dist.get_rank() if dist.is_initialized() else 0):
            return y
        if self.kind == "raise":
            raise ValueError("boom")
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "stop":
            starter = int(os.environ.get("TINY_STARTER", os.getppid()))
            os.kill(starter if dist.is_initialized() else os.getpid(), signal.SIGINT)
        if self.kind == "gradient":
            y.register_hook(lambda gradient: gradient * float("inf"))
        return y * torch.tensor(float("nan")) if self.kind == "nan" else y
