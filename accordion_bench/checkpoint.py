"""Checkpoints: one file per worker and one that all share, as a folder that appears whole or not at all.

    checkpoint/step-00000042/shared.pt  worker-0.pt  worker-1.pt ...

Everything is keyed by parameter name and loads with `weights_only=True`. The files of all processes must land in one
folder: on several machines the run folder has to be on a shared file system.
"""

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accordion_bench.plan import Plan

if TYPE_CHECKING:
    from accordion_bench.trainer import Trainer

PER_WORKER = "_W"
SUMMED = ("norm_of_sum_mean",)  # signals that are sums over the local workers; the others are the leader's


def latest(run: Path) -> Path | None:
    """The newest whole checkpoint of a run folder."""
    return max((path for path in (run / "checkpoint").glob("step-*") if path.suffix == ""), default=None)


def save(run: Path, trainer: "Trainer") -> Path:
    """Save the state after the trainer's last step, then remove older checkpoints; every process calls it."""
    comm = trainer.comm
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
        for name, param in zip(names, trainer.axis.params, strict=True):
            param.copy_(shared["parameters"][name])
            for key, value in shared["optimizer"][name].items():
                on_device = isinstance(value, Tensor) and key != "step"  # Adam counts its steps on the CPU
                trainer.optimizer.state[param][key] = value.to(param.device) if on_device else value
    trainer.plan = Plan(**shared["plan"])
    for name, policy in trainer.policies.items():
        policy.load_state_dict(shared["policies"][name])
    trainer.sync.load_state_dict(shared["sync"])
    trainer.step_decisions = shared["step_decisions"]
    trainer.epoch, trainer.step, trainer.step_in_epoch = shared["epoch"], shared["step"], shared["step_in_epoch"]
    trainer.best = shared["best"]
    trainer.to_target = shared["to_target"]
    trainer.comm.ledger.counts.update(shared["ledger"])
    trainer.clock.totals.update(shared["clock"])
    torch.set_rng_state(shared["rng"])
    for name, entries in shared["compressor"].items():
        moved = {key: value.to(trainer.device) for key, value in entries.items()}
        trainer.exchange.state.setdefault(name, {}).update(moved)
    trainer.signals.begin(frozenset(shared["signals"]))
    for row in range(trainer.comm.local_workers):
        file = path / f"worker-{trainer.comm.first_worker + row}.pt"
        _load_worker(torch.load(file, map_location="cpu", weights_only=True), trainer, row)


def _worker_state(trainer: "Trainer", row: int) -> dict[str, Any]:
    first = row == 0  # sums over the local workers are kept by the first of them
    return {
        "buffers": {name: buffer_W[row].clone() for name, buffer_W in trainer.axis.buffers_W.items()},
        "compressor": {
            name: {key: value[row].clone() for key, value in entries.items() if key.endswith(PER_WORKER)}
            for name, entries in trainer.exchange.state.items()
        },
        "signals": {
            name: sums
            for name, sums in trainer.signals.state_dict().items()
            if first and (trainer.comm.leader or name in SUMMED)
        },
        "statistics": {name: sums[row].clone() for name, sums in trainer.statistics.sums.items()},
        "loss_sum": trainer.loss_sum.clone() if first else torch.zeros_like(trainer.loss_sum),
    }


def _load_worker(state: dict[str, Any], trainer: "Trainer", row: int) -> None:
    for name, buffer in state["buffers"].items():
        trainer.axis.buffers_W[name][row].copy_(buffer)
    for name, entries in state["compressor"].items():
        for key, value in entries.items():
            trainer.exchange.state[name][key][row].copy_(value)
    trainer.signals.add_state(state["signals"])
    for name, sums in state["statistics"].items():
        empty = torch.zeros(trainer.comm.local_workers, *sums.shape, dtype=sums.dtype, device=trainer.device)
        trainer.statistics.sums.setdefault(name, empty)[row].copy_(sums)
    trainer.loss_sum += state["loss_sum"].to(trainer.device)


def _shared_state(trainer: "Trainer") -> dict[str, Any]:
    names = [spec.name for spec in trainer.axis.specs]
    named = list(zip(names, trainer.axis.params, strict=True))
    return {
        "parameters": {name: param.detach().clone() for name, param in named},
        "optimizer": {name: dict(trainer.optimizer.state[param]) for name, param in named},
        "compressor": {
            name: {key: value for key, value in entries.items() if not key.endswith(PER_WORKER)}
            for name, entries in trainer.exchange.state.items()
        },
        "plan": {
            "levels": dict(trainer.plan.levels),
            "batch_size": trainer.plan.batch_size,
            "lr_factor": trainer.plan.lr_factor,
            "codebooks": dict(trainer.plan.codebooks),
        },
        "policies": {name: policy.state_dict() for name, policy in trainer.policies.items()},
        "signals": sorted(trainer.needs()),
        "sync": trainer.sync.state_dict(),
        "step_decisions": trainer.step_decisions,
        "epoch": trainer.epoch,
        "step": trainer.step,
        "step_in_epoch": trainer.step_in_epoch,
        "best": trainer.best,
        "to_target": trainer.to_target,
        "ledger": dict(trainer.comm.ledger.counts),
        "clock": trainer.clock.read(),
        "rng": torch.get_rng_state(),
    }
