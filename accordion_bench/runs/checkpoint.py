"""Checkpoints: one file per worker and one that all share, as a folder that appears whole or not at all.

    checkpoint/step-00000042/shared.pt  worker-0.pt  worker-1.pt ...

Everything is keyed by parameter name and loads with `weights_only=True`. The files of all processes must land in one
folder: on several machines the run folder has to be on a shared file system.
"""

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.runs.old_folders import checkpoint_in_todays_words


class OfAll(Protocol):
    """Who has state that all workers have in common; its keys are nobody else's."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class OfEach(Protocol):
    """Who has state of each local worker; its keys are nobody else's."""

    def worker_state(self, row: int) -> dict[str, Any]: ...

    def load_worker_state(self, row: int, state: dict[str, Any]) -> None: ...


class Owners(NamedTuple):
    """Everybody who has state, in the order in which it is to be loaded."""

    of_all: Sequence[OfAll]
    of_each: Sequence[OfEach]


class GlobalGenerator:
    """The state of torch's global generator."""

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"rng": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        torch.set_rng_state(state["rng"])


def latest(run: Path) -> Path | None:
    """The newest whole checkpoint of a run folder."""
    return max((path for path in (run / "checkpoint").glob("step-*") if path.suffix == ""), default=None)


def save(run: Path, step: int, comm: Comm, owners: Owners) -> Path:
    """Save the state after a step, then remove older checkpoints; every process calls it.

    Args:
        run: the run folder.
        step: optimizer steps taken.
        comm: of all workers.
        owners: whose state it is.
    """
    comm.settle(charged=False)
    final = run / "checkpoint" / f"step-{step:08d}"
    part = final.with_suffix(".part")
    if comm.leader:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    comm.barrier()
    for row in range(comm.local_workers):
        state = _merge(owner.worker_state(row) for owner in owners.of_each)
        torch.save(state, part / f"worker-{comm.first_worker + row}.pt")
    if comm.leader:
        torch.save(_merge(owner.state_dict() for owner in owners.of_all), part / "shared.pt")
    comm.barrier()
    if comm.leader:
        shutil.rmtree(final, ignore_errors=True)
        os.replace(part, final)
        for old in (run / "checkpoint").glob("step-*"):
            if old != final:
                shutil.rmtree(old, ignore_errors=True)
    comm.barrier()
    return final


def load(path: Path, comm: Comm, owners: Owners) -> None:
    """Put freshly built owners into the saved state; every process calls it."""
    shared = checkpoint_in_todays_words(torch.load(path / "shared.pt", map_location="cpu", weights_only=True))
    for owner in owners.of_all:
        owner.load_state_dict(shared)
    for row in range(comm.local_workers):
        file = path / f"worker-{comm.first_worker + row}.pt"
        state = torch.load(file, map_location="cpu", weights_only=True)
        for each in owners.of_each:
            each.load_worker_state(row, state)


def _merge(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """One dictionary of all; no two may use the same key."""
    merged: dict[str, Any] = {}
    for state in states:
        if twice := merged.keys() & state.keys():
            raise ValueError(f"two owners keep {', '.join(sorted(twice))} in a checkpoint")
        merged |= state
    return merged
