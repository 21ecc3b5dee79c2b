"""Manifest of a checkpoint, and writing of one: its folder, its files, and the atomic rename that makes it complete."""

import operator
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from accordion_bench.comm.collectives import Comm
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.instantiate import Config
from accordion_bench.runs import durable, untrusted, weights
from accordion_bench.runs.weights import Damaged

FILE = "manifest.json"
NAME = re.compile(r"step-[0-9]{1,18}")
PLACE = "file"  # key in each file: its name and the step after which it was written

T = TypeVar("T")
Files = dict[str, weights.Written]


@dataclass(frozen=True)
class Trained:
    """Position in training.

    Args:
        epoch: number of complete epochs.
        step: number of optimizer steps.
        step_in_epoch: number of steps taken in the current epoch.
        steps_per_epoch: number of steps of the current epoch.
    """

    epoch: int
    step: int
    step_in_epoch: int
    steps_per_epoch: int

    @property
    def possible(self) -> bool:
        """Whether the numbers are consistent; an epoch has at least one step."""
        within = 0 <= self.step_in_epoch <= self.steps_per_epoch and self.steps_per_epoch > 0
        return within and 0 <= self.epoch <= self.step - self.step_in_epoch

    @property
    def epochs(self) -> float:
        """Number of epochs passed, with the fraction of the current one."""
        return self.epoch + self.step_in_epoch / self.steps_per_epoch


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint's manifest.json.

    Args:
        trained: position in training.
        config: all options that affect the result.
        files: size in bytes and checksum (CRC-32) of each file, by name.
        computed: settings outside the configuration that affect the last bits: `threads` per process, codec `kernels`.
    """

    trained: Trained
    config: Config
    files: dict[str, tuple[int, int]]
    computed: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Return the content of the file."""
        return durable.json_text(asdict(self), indent=1) + "\n"


def checkpoints(run: Path) -> list[Path]:
    """Return the complete checkpoints of a run folder, newest first, including damaged ones."""
    found = [path for path in (run / "checkpoint").glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the number of optimizer steps taken before a checkpoint."""
    return int(path.name.removeprefix("step-"))


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        Damaged: it is missing or cannot be read.
    """
    try:
        content: Any = untrusted.read_json(path / FILE)
        files = {name: (size, checksum) for name, (size, checksum) in content["files"].items()}
        trained = Trained(**{name: operator.index(number) for name, number in content["trained"].items()})
        if not trained.possible or trained.step != step_of(path):
            raise Damaged(f"{FILE} says step {trained.step} in epoch {trained.epoch}, which is impossible")
        return Manifest(trained, dict(content["config"]), files, dict(content["computed"]))
    except FileNotFoundError:
        raise Damaged(f"{FILE} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise Damaged(f"{FILE} cannot be read") from None


def newest_manifest(run: Path) -> Manifest | None:
    """Return the newest checkpoint manifest that can be read; None if there is none."""
    for path in checkpoints(run):
        try:
            return read_manifest(path)
        except Damaged:
            continue
    return None


def unexpected_content_message(path: Path, error: Exception) -> str:
    """Return the error message for a checkpoint that is readable but has unexpected content."""
    why = " ".join(str(error).split())[:200]
    return (
        f"resume must be a run whose checkpoints this version has written, got {path}, which holds something else "
        f"({type(error).__name__}: {why}); type the run's own options without resume= for a new run"
    )


def none_readable(run: Path, problems: list[str]) -> ConfigError:
    """Return the error for a run without a readable checkpoint."""
    return ConfigError(
        f"resume must be a run with a checkpoint that can be read, got {run}, where {'; '.join(problems)}; "
        f"type rm -r {run / 'checkpoint'} to start it again"
    )


# ---- writing


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
