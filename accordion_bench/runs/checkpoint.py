"""Checkpoints: saving and loading one file per worker and one shared file, in a folder that appears atomically.

    checkpoint/step-00000042/manifest.json  shared.pt  worker-0.pt  worker-1.pt ...

All state is keyed by parameter name and loads with `weights_only=True`. All processes write to the same folder, so with
several hosts the run folder must be on a shared file system.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.options.checks import ConfigError
from accordion_bench.runs import weights
from accordion_bench.runs.saving import (
    FILE,
    PLACE,
    BlockingWriter,
    Damaged,
    Manifest,
    Saving,
    checkpoints,
    none_readable,
    read_manifest,
    step_of,
    together,
    unexpected_content_message,
)


class SharedStateOwner(Protocol):
    """Owner of state that is equal on all workers; no other owner uses its keys."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class WorkerStateOwner(Protocol):
    """Owner of state of each local worker; no other owner uses its keys."""

    def worker_state(self, row: int) -> dict[str, Any]: ...

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None: ...


class Owners(NamedTuple):
    """All owners of state, in loading order."""

    of_all: Sequence[SharedStateOwner]
    of_each: Sequence[WorkerStateOwner]


class LoadOnlyOwner(NamedTuple):
    """Owner that only loads: one function restores the whole state."""

    load_state_dict: Callable[[dict[str, Any]], None]

    def state_dict(self) -> dict[str, Any]:
        """Return no state: other owners save it."""
        return {}


class GlobalGenerator:
    """State of torch's global random generators of a process.

    After a change of placement each process continues from the state of its first worker.

    Args:
        device: device of the run; a GPU has its own generator.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def worker_state(self, row: int) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        cuda = {"cuda_rng": torch.cuda.get_rng_state(self.device)} if self.device.type == "cuda" else {}
        return {"rng": torch.get_rng_state(), **cuda}

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Restore the state that `worker_state()` returned."""
        if row > 0:
            return
        torch.set_rng_state(state["rng"])
        if self.device.type == "cuda" and "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)


def latest(run: Path) -> Path | None:
    """Return the newest complete checkpoint of a run folder, None if there is none."""
    return next(iter(checkpoints(run)), None)


def save(saving: Saving, comm: Comm, owners: Owners, writer: BlockingWriter) -> Path:
    """Save the state after a step, then remove older checkpoints; every process calls this.

    Args:
        saving: the checkpoint to write.
        comm: communicator of all workers.
        owners: owners of the state.
        writer: writer of this run; a checkpoint that it is still writing is finished first.

    Returns:
        the checkpoint's folder, which exists once the writer has finished.

    Raises:
        ConfigError: the disk is full; existing checkpoints are unchanged.
    """
    writer.finish()
    comm.settle(charged=False)
    together(comm, saving, lambda: saving.begin() if comm.leader else None)
    states = {
        f"worker-{comm.first_worker + row}.pt": merged(owner.worker_state(row) for owner in owners.of_each)
        for row in range(comm.local_workers)
    }
    if comm.leader:
        states["shared.pt"] = merged(owner.state_dict() for owner in owners.of_all)
    writer.write(saving, states)
    return saving.final


def load_newest(run: Path, comm: Comm, owners: Owners) -> tuple[Path | None, list[str]]:
    """Load the newest checkpoint that all processes can read into freshly built owners; every process calls this.

    Returns:
        that checkpoint, None if there is none; and one problem for each newer checkpoint that could not be read.

    Raises:
        ConfigError: there are checkpoints but none is readable, or the newest readable one is another program's.
    """
    problems: list[str] = []
    for name in comm.gather_objects([path.name for path in checkpoints(run)])[0]:
        path, problem = run / "checkpoint" / name, ""
        try:
            states = read(path, comm.local if owners.of_each else ())
        except Damaged as damaged:
            problem = str(damaged)
        told = [problem for problem in comm.gather_objects(problem) if problem]
        if not told:
            try:
                _put(states, comm, owners)
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise ConfigError(unexpected_content_message(path, error)) from error
            return path, problems
        problems.append(f"{name} is damaged: {told[0]}")
    if problems:
        raise none_readable(run, problems)
    return None, []


def load(path: Path, comm: Comm, owners: Owners) -> None:
    """Load one checkpoint into freshly built owners; every process calls this.

    Raises:
        Damaged: the checkpoint is damaged.
    """
    _put(read(path, comm.local if owners.of_each else ()), comm, owners)


def read(path: Path, workers: Iterable[int]) -> list[dict[str, Any]]:
    """Read the shared state of a checkpoint, followed by the state of the workers with the given numbers.

    Raises:
        Damaged: the checkpoint is damaged.
    """
    manifest = read_manifest(path)
    shared = _loaded(path / "shared.pt", manifest)
    return [shared, *(_loaded(path / f"worker-{worker}.pt", manifest) for worker in workers)]


def _put(states: Sequence[dict[str, Any]], comm: Comm, owners: Owners) -> None:
    shared, *own = states
    for owner in owners.of_all:
        owner.load_state_dict(shared)
    for row, state in enumerate(own):
        for each in owners.of_each:
            each.load_worker_state(row, state)


def _loaded(path: Path, manifest: Manifest) -> dict[str, Any]:
    if path.name not in manifest.files:
        raise Damaged(f"{FILE} does not list {path.name}")
    state = weights.read(path, manifest.files[path.name])
    if state.pop(PLACE, None) != [path.name, step_of(path.parent)]:
        raise Damaged(f"{path.name} belongs to another worker or step")
    return state


def merged(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the union of the dictionaries.

    Raises:
        ValueError: two of them use the same key.
    """
    found: dict[str, Any] = {}
    for state in states:
        if twice := found.keys() & state.keys():
            raise ValueError(f"two owners keep {', '.join(sorted(twice))} in a checkpoint")
        found |= state
    return found
