"""Checkpoints: one file per worker and one that all share, as a folder that appears whole or not at all.

    checkpoint/step-00000042/manifest.json  shared.pt  worker-0.pt  worker-1.pt ...

Everything is keyed by parameter name and loads with `weights_only=True`. The files of all processes must land in one
folder: on several machines the run folder has to be on a shared file system.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.options.checks import ConfigError
from accordion_bench.runs import weights
from accordion_bench.runs.manifest import (
    FILE,
    Damaged,
    Manifest,
    checkpoints,
    none_readable,
    of_something_else,
    read_manifest,
    step_of,
)
from accordion_bench.runs.saving import PLACE, AtOnce, Saving, together


class OfAll(Protocol):
    """Who has state that all workers have in common; its keys are used by no other."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class OfEach(Protocol):
    """Who has state of each local worker; its keys are used by no other."""

    def worker_state(self, row: int) -> dict[str, Any]: ...

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None: ...


class Owners(NamedTuple):
    """All that have state, in the order in which it is to be loaded."""

    of_all: Sequence[OfAll]
    of_each: Sequence[OfEach]


class LoadedAlone(NamedTuple):
    """State that one function puts in its place, whole."""

    load_state_dict: Callable[[dict[str, Any]], None]

    def state_dict(self) -> dict[str, Any]:
        """It is saved by others."""
        return {}


class GlobalGenerator:
    """The state of torch's global generators of one process; in another placement that of its first worker's counts.

    Args:
        device: of the run; a GPU has a generator of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def worker_state(self, row: int) -> dict[str, Any]:
        """For checkpoints."""
        cuda = {"cuda_rng": torch.cuda.get_rng_state(self.device)} if self.device.type == "cuda" else {}
        return {"rng": torch.get_rng_state(), **cuda}

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None:
        """Continue from `worker_state()`."""
        if row > 0:
            return
        torch.set_rng_state(state["rng"])
        if self.device.type == "cuda" and "cuda_rng" in state:
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)


def latest(run: Path) -> Path | None:
    """The newest whole checkpoint of a run folder."""
    return next(iter(checkpoints(run)), None)


def save(saving: Saving, comm: Comm, owners: Owners, writer: AtOnce) -> Path:
    """Save the state after a step, then remove older checkpoints; every process calls it.

    Args:
        saving: the checkpoint that is to be written.
        comm: of all workers.
        owners: whose state it is.
        writer: of this run; what it is still writing is finished first.

    Returns:
        its folder, which is there once the writer has finished.

    Raises:
        ConfigError: the disk is full; the checkpoints that were there are as they were.
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
    """Put freshly built owners into the newest state that all processes can read; every process calls it.

    Returns:
        that checkpoint, None where there is none; and what is wrong with each newer one.

    Raises:
        ConfigError: there are checkpoints, and none can be read; or the newest one holds another program's state.
    """
    problems: list[str] = []
    for name in comm.everyones([path.name for path in checkpoints(run)])[0]:
        path, problem = run / "checkpoint" / name, ""
        try:
            states = read(path, comm.local if owners.of_each else ())
        except Damaged as damaged:
            problem = str(damaged)
        told = [problem for problem in comm.everyones(problem) if problem]
        if not told:
            try:
                _put(states, comm, owners)
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise ConfigError(of_something_else(path, error)) from error
            return path, problems
        problems.append(f"{name} is damaged: {told[0]}")
    if problems:
        raise none_readable(run, problems)
    return None, []


def load(path: Path, comm: Comm, owners: Owners) -> None:
    """Put freshly built owners into the saved state; every process calls it.

    Raises:
        Damaged: it is not as it was written.
    """
    _put(read(path, comm.local if owners.of_each else ()), comm, owners)


def read(path: Path, workers: Iterable[int]) -> list[dict[str, Any]]:
    """The state that all workers have in common, then that of some workers, by their numbers.

    Raises:
        Damaged: it is not as it was written.
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
        raise Damaged(f"{FILE} says nothing of {path.name}")
    state = weights.read(path, manifest.files[path.name])
    if state.pop(PLACE, None) != [path.name, step_of(path.parent)]:
        raise Damaged(f"{path.name} is another worker's, or of another step")
    return state


def merged(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One dictionary of all; no two may use the same key."""
    found: dict[str, Any] = {}
    for state in states:
        if twice := found.keys() & state.keys():
            raise ValueError(f"two owners keep {', '.join(sorted(twice))} in a checkpoint")
        found |= state
    return found
