"""Checkpoints: one file per worker and one that all share, as a folder that appears whole or not at all.

    checkpoint/step-00000042/shared.pt  worker-0.pt  worker-1.pt ...

Everything is keyed by parameter name and loads with `weights_only=True`. The files of all processes must land in one
folder: on several machines the run folder has to be on a shared file system.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accordion_bench.plan import Plan
from accordion_bench.sync.base import Placed

if TYPE_CHECKING:
    from accordion_bench.training.trainer import Trainer

PER_WORKER = "_W"
PROGRESS = ("epoch", "step", "step_in_epoch", "best", "to_target")
DECIDED = ("compression_error", "made", "exchanges", "loss_read_at", "recent_count")
SUMMED = ("norm_of_sum_mean",)  # signals that are sums over the local workers; the others are the leader's


def latest(run: Path) -> Path | None:
    """The newest whole checkpoint of a run folder."""
    return max((path for path in (run / "checkpoint").glob("step-*") if path.suffix == ""), default=None)


def save(run: Path, trainer: "Trainer") -> Path:
    """Save the state after the trainer's last step, then remove older checkpoints; every process calls it."""
    comm = trainer.comm
    comm.settle(charged=False)
    final = run / "checkpoint" / f"step-{trainer.step:08d}"
    part = final.with_suffix(".part")
    if comm.leader:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    comm.barrier()
    for row in range(comm.local_workers):
        torch.save(_worker_state(trainer, row), part / f"worker-{comm.first_worker + row}.pt")
    if comm.leader:
        torch.save(_shared_state(trainer), part / "shared.pt")
    comm.barrier()
    if comm.leader:
        shutil.rmtree(final, ignore_errors=True)
        os.replace(part, final)
        for old in (run / "checkpoint").glob("step-*"):
            if old != final:
                shutil.rmtree(old, ignore_errors=True)
    comm.barrier()
    return final


def load(path: Path, trainer: "Trainer") -> None:
    """Put a freshly built trainer into the saved state; every process calls it."""
    shared = torch.load(path / "shared.pt", map_location="cpu", weights_only=True)
    names = [spec.name for spec in trainer.axis.specs]
    with torch.no_grad():
        for name, value in zip(names, trainer.axis.shared, strict=True):
            value.copy_(shared["parameters"][name])
    trainer.sync.load_state_dict(trainer, shared["sync"])
    if not trainer.optimizers:
        _load_optimizer(trainer.optimizer, names, trainer.axis.params, shared["optimizer"])
    trainer.plan = Plan(**shared["plan"])
    for name, policy in trainer.decisions.policies.items():
        policy.load_state_dict(shared["policies"][name])
    for key in DECIDED:
        setattr(trainer.decisions, key, shared[key])
    for key in PROGRESS:
        setattr(trainer, key, shared[key])
    trainer.comm.ledger.counts.update(shared["ledger"])
    trainer.clock.totals.update(shared["clock"])
    torch.set_rng_state(shared["rng"])
    for place in trainer.sync.exchanges():
        _load_common(shared["exchange_states"].get(place.name, {}), place, trainer)
    trainer.decisions.epoch_sums.begin(frozenset(shared["signals"]))
    for row in range(trainer.comm.local_workers):
        file = path / f"worker-{trainer.comm.first_worker + row}.pt"
        _load_worker(torch.load(file, map_location="cpu", weights_only=True), trainer, row)


def _load_common(state: dict[str, Any], place: Placed, trainer: "Trainer") -> None:
    """What the workers of one exchange have in common."""
    for name, entries in state.items():
        moved = {key: value.to(trainer.device) for key, value in entries.items()}
        place.exchange.state.setdefault(name, {}).update(moved)


def _load_optimizer(
    optimizer: torch.optim.Optimizer, names: list[str], params: Sequence[Tensor], state: dict[str, Any]
) -> None:
    for name, param in zip(names, params, strict=True):
        for key, value in state[name].items():
            on_device = isinstance(value, Tensor) and key != "step"  # Adam counts its steps on the CPU
            optimizer.state[param][key] = value.to(param.device) if on_device else value


def _common(place: Placed) -> dict[str, Any]:
    return {
        name: {key: value for key, value in entries.items() if not key.endswith(PER_WORKER)}
        for name, entries in place.exchange.state.items()
    }


def _rows(place: Placed, row: int) -> dict[str, Any]:
    return {
        name: {key: value[row - place.rows.start].clone() for key, value in entries.items() if key.endswith(PER_WORKER)}
        for name, entries in place.exchange.state.items()
    }


def _worker_state(trainer: "Trainer", row: int) -> dict[str, Any]:
    first = row == 0  # sums over the local workers are kept by the first of them
    names = [spec.name for spec in trainer.axis.specs]
    places = [place for place in trainer.sync.exchanges() if row in place.rows]
    replica = {}
    if trainer.optimizers:
        optimizer, own = trainer.optimizers[row], trainer.axis.replicas[row]
        replica = {
            "parameters": {name: x.detach().clone() for name, x in zip(names, own, strict=True)},
            "optimizer": {name: dict(optimizer.state.get(x, {})) for name, x in zip(names, own, strict=True)},
        }
    return {
        "buffers": {name: buffer_W[row].clone() for name, buffer_W in trainer.axis.buffers_W.items()},
        "replica": replica,
        "sync": trainer.sync.worker_state(row),
        "task": trainer.task.worker_state(row),
        "exchange_states": {place.name: _rows(place, row) for place in places},
        # a group's own state is the leader's to save only where everybody is in it
        "groups": {p.name: _common(p) for p in places if p.exchange.comm is not trainer.comm},
        "signals": {
            name: sums
            for name, sums in trainer.decisions.epoch_sums.state_dict().items()
            if first and (trainer.comm.leader or name in SUMMED)
        },
        "statistics": {name: sums[row].clone() for name, sums in trainer.decisions.statistics.sums.items()},
        "recent": [x.clone() for x in trainer.decisions.recent] if first else [],
        "link": trainer.meter.totals if first else [0, 0],
        "loss_sum": trainer.loss_sum.clone() if first else torch.zeros_like(trainer.loss_sum),
        "unread_loss": trainer.decisions.unread_loss.clone() if first else torch.zeros_like(trainer.loss_sum),
    }


def _load_worker(state: dict[str, Any], trainer: "Trainer", row: int) -> None:
    for name, buffer in state["buffers"].items():
        trainer.axis.buffers_W[name][row].copy_(buffer)
    if replica := state["replica"]:
        names, own = list(replica["parameters"]), trainer.axis.replicas[row]
        with torch.no_grad():
            for x, value in zip(own, replica["parameters"].values(), strict=True):
                x.copy_(value)
        trainer.optimizers[row].state.clear()
        _load_optimizer(trainer.optimizers[row], names, own, replica["optimizer"])
    trainer.sync.load_worker_state(row, state["sync"])
    trainer.task.load_worker_state(row, state["task"], trainer.device)
    for place in trainer.sync.exchanges():
        if row not in place.rows:
            continue
        _load_common(state["groups"].get(place.name, {}), place, trainer)
        for name, entries in state["exchange_states"].get(place.name, {}).items():
            for key, value in entries.items():
                place.exchange.state[name][key][row - place.rows.start].copy_(value)
    trainer.decisions.epoch_sums.add_state(state["signals"])
    for name, sums in state["statistics"].items():
        empty = torch.zeros(trainer.comm.local_workers, *sums.shape, dtype=sums.dtype, device=trainer.device)
        trainer.decisions.statistics.sums.setdefault(name, empty)[row].copy_(sums)
    if state["recent"]:
        trainer.decisions.recent = [x.to(trainer.device) for x in state["recent"]]
    trainer.meter.totals = [a + b for a, b in zip(trainer.meter.totals, state["link"], strict=True)]
    trainer.loss_sum += state["loss_sum"].to(trainer.device)
    trainer.decisions.unread_loss += state["unread_loss"].to(trainer.device)


def _shared_state(trainer: "Trainer") -> dict[str, Any]:
    names = [spec.name for spec in trainer.axis.specs]
    state, places = trainer.optimizer.state, trainer.sync.exchanges()
    return {
        "parameters": {name: value.clone() for name, value in zip(names, trainer.axis.shared, strict=True)},
        "optimizer": {name: dict(state[param]) for name, param in zip(names, trainer.axis.params, strict=True)},
        "exchange_states": {place.name: _common(place) for place in places if place.exchange.comm is trainer.comm},
        "plan": {
            "levels": dict(trainer.plan.levels),
            "batch_size": trainer.plan.batch_size,
            "lr_factor": trainer.plan.lr_factor,
            "period": trainer.plan.period,
            "codebooks": dict(trainer.plan.codebooks),
        },
        "policies": {name: policy.state_dict() for name, policy in trainer.decisions.policies.items()},
        "signals": sorted(trainer.decisions.needs(trainer.epoch)),
        "sync": trainer.sync.state_dict(),
        **{key: getattr(trainer.decisions, key) for key in DECIDED},
        **{key: getattr(trainer, key) for key in PROGRESS},
        "ledger": dict(trainer.comm.ledger.counts),
        "clock": trainer.clock.read(),
        "rng": torch.get_rng_state(),
    }
