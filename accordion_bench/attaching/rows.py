"""Metrics row and text summary of an attachment."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from accordion_bench.attaching.attachment import Attachment
from accordion_bench.attaching.users_optimizer import kind_of
from accordion_bench.comm import on_device
from accordion_bench.comm.clock import EXCLUSIVE
from accordion_bench.options.units import counted, human_bytes
from accordion_bench.plan import plan_record


def metrics_row(attachment: Attachment, own: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of metrics.jsonl for this process with the user's `own`, and a description of the training."""
    comm, position = attachment.comm, attachment.position
    return {
        "epoch": max(position.epoch - 1, 0) if position.step_in_epoch == 0 else position.epoch,
        "step": position.step,
        "lr": position.step_lr,
        **own,
        **comm.ledger.columns(),
        **comm.clock.columns(True),
        **attachment.sync.columns(),
        **attachment.setting.network.columns(comm, attachment.overlap.allowed),
        "plan": plan_record(position.plan, attachment.methods.ladder),
        "decisions": attachment.decisions,
        "run": description(attachment),
    }


def description(attachment: Attachment) -> dict[str, Any]:
    """Return a description of methods, options, model and machine."""
    chosen, comm, model = attachment.setting.chosen, attachment.comm, attachment.model
    return {
        "name": attachment.setting.passed.name,
        "compressor": chosen.compressor_name,
        "adaptive": list(chosen.adaptive),
        "sync": chosen.sync_name,
        "options": {
            "compressor": dict(chosen.compressor),
            "adaptive": {name: dict(node) for name, node in chosen.adaptive.items()},
            "sync": dict(chosen.sync),
        },
        "workers": comm.workers,
        **({"batch_size": list(comm.samples)} if comm.samples else {}),
        "processes": comm.processes,
        "seed": attachment.setting.passed.seed,
        "network": attachment.setting.passed.network,
        "model": type(getattr(model, "_orig_mod", model)).__name__,
        "parameters": sum(spec.numel for spec in attachment.axis.specs),
        "optimizer": kind_of(attachment.optimizer),
        "versions": {name: _version(name) for name in ("accordion-bench", "torch")},
        "host": platform.node(),
        "processor": on_device.processor_name(),
        "cpu_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "started": attachment.started,
        "device": comm.device.type,
        "gpus": on_device.gpu_models(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def told(attachment: Attachment) -> str:
    """Return a text with bytes relative to dense exchange, time by part, and compression levels by layer."""
    comm, position = attachment.comm, attachment.position
    sent = comm.ledger.columns()
    chosen = attachment.setting.chosen
    names = [f"compressor={chosen.compressor_name}", *(f"adaptive={name}" for name in chosen.adaptive)]
    names += [f"sync={chosen.sync_name}"] if attachment.sync.local else []
    lines = [f"{' '.join(names)}, {counted(comm.workers, 'worker')}, {counted(position.step, 'step')}"]
    for what in ("payload", "wire"):
        spent, dense = sent[f"{what}_bytes"], sent["dense_bytes" if what == "payload" else "dense_wire_bytes"]
        ratio = f", {dense / spent:.3g} times fewer than dense fp32" if spent and dense else ""
        lines.append(f"{what}: {human_bytes(spent)} per worker{ratio}")
    spent_seconds = comm.clock.columns(True)
    steps = max(comm.clock.steps.timed, 1)  # the first step after each pause is not timed
    parts = ", ".join(f"{part} {1000 * (spent_seconds[f'{part}_seconds'] or 0) / steps:.3g}" for part in EXCLUSIVE[1:])
    lines.append(f"milliseconds per step: {parts}; encode, wait for others and decode run beside compute")
    levels = plan_record(position.plan, attachment.methods.ladder)["levels"]
    knob = attachment.methods.ladder.knob
    lines += [f"  {name}: {knob} {level:g}" for name, level in levels.items()]
    return "\n".join(lines)


def bucket_rows(attachment: Attachment) -> list[dict[str, Any]]:
    """Return for each bucket of the current exchange its tensors and medians of its times."""
    exchange, found = attachment.exchange, attachment.comm.clock.exchanges()
    latest = {kind._replace(plan=None): stages for kind, (*_, stages) in found.items()}
    stages = [stage for part in attachment.sync.parts for stage in latest.get(part.kind, [])]
    return [
        {
            "parameters": [exchange.specs[i].name for i in members],
            "numel": sum(exchange.specs[i].numel for i in members),
            "ready_seconds": stage.ready,
            "encode_seconds": stage.encode,
            "decode_seconds": stage.decode,
            "wire_bytes": stage.wire,
            "rounds": stage.rounds,
        }
        for members, stage in zip(exchange.members, stages, strict=False)
    ]
