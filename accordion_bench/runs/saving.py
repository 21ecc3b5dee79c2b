"""Writing of one checkpoint: its folder, its files, and the atomic rename that makes it complete."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from accordion_bench.comm.collectives import Comm
from accordion_bench.options.checks import ConfigError
from accordion_bench.runs import durable, weights
from accordion_bench.runs.manifest import FILE, Manifest, checkpoints, step_of

PLACE = "file"  # key in each file: its name and the step after which it was written

T = TypeVar("T")
Files = dict[str, weights.Written]


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written.

    Args:
        run: the run folder.
        begun: manifest, still without files.
        keep: number of checkpoints to keep, including this one.
    """

    run: Path
    begun: Manifest
    keep: int

    @property
    def final(self) -> Path:
        """Folder of the complete checkpoint."""
        return self.run / "checkpoint" / f"step-{self.begun.trained.step:08d}"

    @property
    def part(self) -> Path:
        """Folder of the checkpoint until it is complete."""
        return self.final.with_suffix(".part")

    def begin(self) -> None:
        """Create an empty folder; only the leader calls this."""
        self.drop()
        self.part.mkdir(parents=True)

    def drop(self) -> None:
        """Remove the partial checkpoint."""
        shutil.rmtree(self.part, ignore_errors=True)

    def write(self, states: dict[str, dict[str, Any]]) -> Files:
        """Write the files of one process; return when they are on disk.

        Raises:
            OSError: for instance, the disk is full.
        """
        step = self.begun.trained.step
        return {name: weights.write(self.part / name, {**state, PLACE: [name, step]}) for name, state in states.items()}

    def end(self, files: Files) -> None:
        """Complete the checkpoint, with the files of all processes, and remove older ones; only the leader calls this.

        Raises:
            OSError: for instance, the disk is full.
        """
        if (metrics := self.run / "metrics.jsonl").exists():
            durable.sync(metrics)  # the rows of a checkpoint's epochs must be on disk first
        durable.write_text(self.part / FILE, replace(self.begun, files=files).text())
        shutil.rmtree(self.final, ignore_errors=True)
        durable.replace(self.part, self.final)
        durable.sync(self.run)  # the first checkpoint has created the folder `checkpoint`
        remove_older(self.run, self.keep, self.begun.trained.step)


def remove_older(run: Path, keep: int, step: int) -> None:
    """Keep the newest `keep` checkpoints up to `step`; remove all others, including those of an abandoned future."""
    kept = [path for path in checkpoints(run) if step_of(path) <= step][:keep]
    for path in (run / "checkpoint").glob("step-*"):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


class BlockingWriter:
    """Writer of checkpoints that blocks training."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def write(self, saving: Saving, states: dict[str, dict[str, Any]]) -> None:
        """Write the checkpoint from the state of this process, by file name; every process calls this.

        Raises:
            ConfigError: a disk is full; all processes raise the same error.
        """
        written = together(self.comm, saving, lambda: saving.write(states))
        files = {name: found for of_one in written for name, found in of_one.items()}
        together(self.comm, saving, lambda: saving.end(files) if self.comm.leader else None)

    def look(self) -> None:
        """Check whether writing has failed; every process calls this."""

    def finish(self) -> None:
        """Wait until the last checkpoint is complete; every process calls this."""

    def close(self) -> None:
        """End writing when training ends, possibly by an error."""


def together(comm: Comm, saving: Saving, work: Callable[[], T]) -> list[T]:
    """Run one step of saving on every process; return the results of all, once all are done.

    Raises:
        ConfigError: the disk of a process is full; all processes raise the same error.
    """
    told, done = "", None
    try:
        with durable.room(saving.run):
            done = work()
    except ConfigError as full:
        told = str(full)
    heard = comm.gather_objects((told, done))
    for told, _ in heard:
        if told:
            if comm.leader:
                saving.drop()
            raise ConfigError(told)
    return [done for _, done in heard]
