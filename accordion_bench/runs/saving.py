"""A checkpoint while it is being written: its folder, its files, and the moment in which it becomes whole."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from accordion_bench.comm.collectives import Comm
from accordion_bench.options.checks import ConfigError
from accordion_bench.runs import durable, weights
from accordion_bench.runs.manifest import FILE, Manifest, checkpoints, step_of

PLACE = "file"  # in each file: its own name, and after which step it was written

T = TypeVar("T")
Files = dict[str, weights.Written]


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written.

    Args:
        run: the run folder.
        begun: its manifest, which has no files yet.
        keep: how many checkpoints stay, this one included.
    """

    run: Path
    begun: Manifest
    keep: int

    @property
    def final(self) -> Path:
        """Its folder, once it is whole."""
        return self.run / "checkpoint" / f"step-{self.begun.trained.step:08d}"

    @property
    def part(self) -> Path:
        """Its folder until then."""
        return self.final.with_suffix(".part")

    def begin(self) -> None:
        """An empty folder; the leader makes it."""
        self.drop()
        self.part.mkdir(parents=True)

    def drop(self) -> None:
        """Remove what is half written."""
        shutil.rmtree(self.part, ignore_errors=True)

    def write(self, states: dict[str, dict[str, Any]]) -> Files:
        """Write the files of one process; returns when they are on the disk.

        Raises:
            OSError: the disk is full, say.
        """
        step = self.begun.trained.step
        return {name: weights.write(self.part / name, {**state, PLACE: [name, step]}) for name, state in states.items()}

    def end(self, files: Files) -> None:
        """Make it whole, and remove older ones; the leader does.

        Args:
            files: of all processes.

        Raises:
            OSError: the disk is full, say.
        """
        if (metrics := self.run / "metrics.jsonl").exists():
            durable.sync(metrics)  # a checkpoint's epochs must have their rows
        durable.write_text(self.part / FILE, replace(self.begun, files=files).text())
        shutil.rmtree(self.final, ignore_errors=True)
        durable.replace(self.part, self.final)
        durable.sync(self.run)  # where the first one has made the folder
        remove_older(self.run, self.keep, self.begun.trained.step)


def remove_older(run: Path, keep: int, step: int) -> None:
    """Keep the newest checkpoints up to a step; later ones are of a future that is no more."""
    kept = [path for path in checkpoints(run) if step_of(path) <= step][:keep]
    for path in (run / "checkpoint").glob("step-*"):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


class AtOnce:
    """Writes checkpoints while training waits.

    Args:
        comm: of all workers.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def write(self, saving: Saving, states: dict[str, dict[str, Any]]) -> None:
        """Write what is begun; every process calls it.

        Args:
            saving: the checkpoint.
            states: of this process, by file name.

        Raises:
            ConfigError: a disk is full; all raise the same.
        """
        written = together(self.comm, saving, lambda: saving.write(states))
        files = {name: found for of_one in written for name, found in of_one.items()}
        together(self.comm, saving, lambda: saving.end(files) if self.comm.leader else None)

    def look(self) -> None:
        """Has writing failed? Every process calls it."""

    def finish(self) -> None:
        """Wait until the last checkpoint is whole; every process calls it."""

    def close(self) -> None:
        """Training has ended, by an error perhaps."""


def together(comm: Comm, saving: Saving, work: Callable[[], T]) -> list[T]:
    """Let every process do its share of saving; what each has returned, once all are done.

    Raises:
        ConfigError: the disk of one of them is full; all raise the same.
    """
    told, done = "", None
    try:
        with durable.room(saving.run):
            done = work()
    except ConfigError as full:
        told = str(full)
    heard = comm.everyones((told, done))
    for told, _ in heard:
        if told:
            if comm.leader:
                saving.drop()
            raise ConfigError(told)
    return [done for _, done in heard]
