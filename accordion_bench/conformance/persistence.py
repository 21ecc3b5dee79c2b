"""State: what is saved in the middle continues bit for bit."""

import io
from typing import Any

import torch
from torch import Tensor

from accordion_bench.conformance.subject import Maker, Setup, demand, same_bits
from accordion_bench.conformance.tensors import SPECS, gradients
from accordion_bench.sync.base import PER_WORKER


def check_state(make: Maker, level: float | None = None) -> str:
    """Saved after three steps and loaded into a fresh compressor, as a checkpoint does, it continues with equal bits.

    A checkpoint keeps a key that ends in `_W` per worker, and copies each worker's row into what `init` has made;
    everything else is kept once, and is equal on all processes.
    """
    setup = Setup(make(), level)
    for step in range(3):
        setup(gradients(step=step), step, lr=0.5)
    state, workers = setup.exchange.state, setup.comm.local_workers
    for name, entries in state.items():
        for key, value in entries.items():
            demand(isinstance(value, Tensor), f"{name}.{key} is a {type(value).__name__}, not a tensor")
            rows = value.shape[0] if value.ndim else 0
            if key.endswith(PER_WORKER):
                demand(rows == workers, f"{name}.{key} has {rows} rows, not one for each of {workers} workers")
    saved = io.BytesIO()
    torch.save(setup.snapshot(), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    resumed = Setup(make(), level)
    _load(resumed.exchange.state, loaded)
    for step in range(3, 6):
        straight, again = setup(gradients(step=step), step, lr=0.25), resumed(gradients(step=step), step, lr=0.25)
        for spec, a, b in zip(SPECS, straight, again, strict=True):
            off = float((a - b).abs().max())
            said = f"after loading, the update of {spec.name} in step {step} is off by {off:.2g}"
            demand(same_bits(a, b), f"{said}: something is kept outside `state`")
    return f"{saved.getbuffer().nbytes} B saved, equal bits afterwards"


def _load(state: dict[str, dict[str, Any]], loaded: dict[str, dict[str, Any]]) -> None:
    for name, entries in loaded.items():
        for key, value in entries.items():
            if not key.endswith(PER_WORKER):
                state.setdefault(name, {})[key] = value
                continue
            demand(key in state.get(name, {}), f"{name}.{key} has one row per worker, but init() does not make it")
            state[name][key].copy_(value)
