"""Trainers whose steps are captured on a tape, and eager twins, on a CPU or on a pretended device."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.graphs import Graphs
from accordion_bench.comm.on_device import Streams
from accordion_bench.config import components
from accordion_bench.conformance.placement import TapeGraphs
from accordion_bench.conformance.pretend_device import Counts, pretended
from accordion_bench.optimizers.inner import fused
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training import training_step
from accordion_bench.training.trainer import Trainer
from tests.kit import composed

TINY = [
    *("dataset=synthetic", "dataset.size=8", "epochs=3", "dataset.train_size=96", "dataset.test_size=8"),
    *("batch_size=4", "comm.bucket_cap_mb=0.001"),
]
PLAIN = ["model._target_=tests.kit.models.Plain", "~model.depth"]


class Pair(NamedTuple):
    """Two trainers of one configuration.

    eager: trainer that launches every operation.
    taped: trainer that captures on `tape` and replays.
    counts: counters of the pretended device; empty on a CPU.
    """

    eager: Trainer
    taped: Trainer
    tape: TapeGraphs
    counts: Counts

    def step(self, steps: int = 1) -> None:
        """Take steps with both trainers."""
        for _ in range(steps):
            for trainer in (self.eager, self.taped):
                step(trainer)

    def same(self) -> bool:
        """Return whether parameters, buffers, optimizers and counts are equal, to the bit."""
        a, b = self.eager, self.taped
        pairs = [
            *zip(a.axis.shared, b.axis.shared, strict=True),
            *zip(a.axis.buffers_W.values(), b.axis.buffers_W.values(), strict=True),
            *((x, y) for p, q in zip(a.axis.replicas, b.axis.replicas, strict=True) for x, y in zip(p, q, strict=True)),
        ]
        return a.comm.ledger.counts == b.comm.ledger.counts and all(torch.equal(x.cpu(), y.cpu()) for x, y in pairs)


def step(trainer: Trainer) -> None:
    """Take one step, and begin the next epoch where this one has ended."""
    if trainer.position.step_in_epoch == trainer.position.steps_per_epoch:
        trainer.end_epoch()
        trainer.begin_epoch()
    trainer.train_step()


def trainer_for(
    folder: Path, graphs: Graphs, *overrides: str, device: str = "cpu", workers: int = 2, comm: Comm | None = None
) -> Trainer:
    """Return a trainer at the start of its first epoch, with optimizers as on a GPU; close its progress after use."""
    tiny = [] if any(typed.startswith("dataset=") for typed in overrides) else TINY
    config = RunConfig.from_dict(composed.cfg(*tiny, *overrides))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_step, "graphs_of", lambda _: graphs)
        patch.setattr(components, "fused", lambda cls, _: fused(cls, torch.device("cuda")))
        trainer = Trainer(config, comm or Comm(workers, device=device), RunFolder(folder))
    trainer.runner.finite.late = True
    trainer.runner.preload()
    trainer.progress.begin(trainer.position.steps_left, 0)
    trainer.begin_epoch()
    return trainer


@contextlib.contextmanager
def pair(
    folder: Path, *overrides: str, device: str = "cpu", workers: int = 2, streams: Streams | None = None
) -> Iterator[Pair]:
    """Return both trainers on `cpu`, or on `meta`, the pretended device; `streams` replace those of a GPU."""
    tape = TapeGraphs(streams)
    made = functools.partial(trainer_for, folder, device=device, workers=workers)
    with pretended() if device == "meta" else contextlib.nullcontext() as counts:
        both = Pair(made(Graphs(), *overrides), made(tape, *overrides), tape, counts or Counts())
        with contextlib.closing(both.eager.progress), contextlib.closing(both.taped.progress):
            yield both
