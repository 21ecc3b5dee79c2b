"""Checks of bytes, levels, options and state: predicted sizes, refused options, resumed checkpoints."""

import io
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.probe import payload_bytes
from accordion_bench.compressors.residuals import FLOATS
from accordion_bench.compressors.traits import COLLECTIVES
from accordion_bench.conformance.subject import (
    SPECS,
    Maker,
    NotApplicable,
    Setup,
    demand,
    flat,
    gradients,
    kept_residuals,
    same_bits,
)
from accordion_bench.options.checks import ConfigError
from accordion_bench.sync.scheme import PER_WORKER


def check_payload(make: Maker, level: float | None = None) -> str:
    """The payload equals the prediction if `fixed_size`, otherwise it is at most that; 1, 2, 4, 16 workers."""
    counted = promised = 0
    for workers in (1, 2, 4, 16):
        setup = Setup(make(), level, workers, dtype=torch.float32)
        traits = setup.compressor.traits
        for step in range(traits.cycle if traits.fixed_size else 2):
            before, promised = setup.comm.ledger.counts["payload"], setup.payload(step)
            setup(gradients(workers=workers, step=step, dtype=torch.float32), step)
            counted = setup.comm.ledger.counts["payload"] - before
            where = f"of {workers} workers in step {step}"
            if traits.fixed_size:
                said = f"the ledger has {counted} bytes {where}, but payload_bytes promises {promised}"
                demand(counted == promised, f"{said}: messages are not as long as they claim")
            said = f"the ledger has {counted} bytes {where}, above the bound of {promised} by payload_bytes"
            demand(counted <= promised, said)
    sign = "=" if setup.compressor.traits.fixed_size else "<="
    return f"{counted / 16:.0f} {sign} {promised / 16:.0f} B per worker at 16 workers"


def check_wire(make: Maker, level: float | None = None) -> str:
    """Wire bytes are at most those of a dense all-reduce, with 1, 2, 4, 16, 64 workers."""
    specs, worst = [SPECS[i] for i in (1, 2, 6, 7)], 0.0  # a large one, a vector, an odd one, one entry
    for workers in (1, 2, 4, 16, 64):
        setup = Setup(make(), level, workers, specs, dtype=torch.float32)
        setup(gradients(specs, workers, dtype=torch.float32))
        setup.comm.ledger.dense_step(setup.exchange.numel)
        counts = setup.comm.ledger.counts
        said = f"{counts['wire']} wire bytes of {workers} workers, more than the {counts['dense_wire']} of all-reduce"
        demand(counts["wire"] <= counts["dense_wire"], said)
        worst = max(worst, counts["wire"] / max(counts["dense_wire"], 1))
    return f"at most {worst:.3f} of dense"


def check_levels(make: Maker, level: float | None = None) -> str:
    """Invalid values of the knob are refused with a sentence; the pair's strong level costs at most the weak one."""
    compressor = make().compressor
    for value in (0, -1, "x", None, True):
        try:
            compressor.check_level("level", value)
        except ConfigError:
            continue
        raise AssertionError(f"check_level takes {value!r}")
    if compressor.traits.knob is None:
        return "no levels"
    strong, weak = (compressor.check_level("level", value) for value in compressor.traits.pair)
    costs = [sum(payload_bytes(compressor, spec, at, 4) for spec in SPECS) for at in (strong, weak)]
    knob = compressor.traits.knob
    said = f"{knob}={strong:g} costs {costs[0]:.0f} B and {knob}={weak:g} {costs[1]:.0f} B"
    demand(strong < weak and costs[0] <= costs[1], f"{said}: the pair must be (strong, weak)")
    return said


def check_start_step(make: Maker, level: float | None = None) -> str:
    """Before `start_step` the update and its bytes are those of a dense all-reduce, and residuals are zero."""
    wrapped = make(worker_momentum=False)
    if "momentum" in wrapped.compressor.traits.optimizer.owns:
        raise NotApplicable("the momentum is the compressor's own")
    setup, dense = Setup(wrapped, level, dtype=torch.float32, start_step=2), Comm(4)
    for step in range(2):
        xs_W = gradients(step=step, dtype=torch.float32)
        same = all(
            torch.equal(u, d.view(u.shape)) for u, d in zip(setup(xs_W, step), dense.all_reduce_mean(xs_W), strict=True)
        )
        demand(same, f"step {step} is before start_step=2, but the update is not the dense mean")
        found = {name: entries[FLOATS] for name, entries in setup.exchange.state.items() if FLOATS in entries}
        found |= {setup.exchange.sent[i].name: e_W for i, e_W in kept_residuals(setup)[0].items()}
        for name, e_W in found.items():
            kept = float(e_W.abs().max()) if e_W.numel() else 0.0
            demand(kept == 0, f"step {step} is dense, but leaves a residual of up to {kept:.2g} in {name}")
    counted, dense_bytes = setup.comm.ledger.counts["payload"], dense.ledger.counts["payload"]
    demand(counted == dense_bytes, f"two dense steps cost {counted} bytes instead of {dense_bytes}")
    updates = setup(gradients(step=2, dtype=torch.float32), 2)
    demand(bool(flat(updates).isfinite().all()), "the first compressed step gives NaN or infinity")
    return f"{dense_bytes // 8} B per worker and step, then {setup.payload(2) // 4} B"


def check_collectives(make: Maker, level: float | None = None) -> str:
    """Every declared collective works; other collectives are refused with a sentence."""
    declared = make().compressor.traits.collectives
    for collective in COLLECTIVES:
        if collective in declared:
            updates = Setup(make(collective=collective), level)(gradients())
            demand(bool(flat(updates).isfinite().all()), f"over {collective} the update has NaN or infinity")
            continue
        try:
            make(collective=collective)
        except ConfigError:
            continue
        raise AssertionError(f"collective={collective} is not declared, but not refused either")
    return ", ".join(declared)


def check_scope(make: Maker, level: float | None = None) -> str:
    """With `scope=model` all tensors are sent as one vector with one level; refused where this is not supported."""
    try:
        wrapped = make(scope="model")
    except ConfigError as refused:
        claims = make().compressor.traits.whole_model
        demand(not claims, f"whole_model is declared, but scope=model is refused: {refused}")
        raise NotApplicable("works on matrices") from None
    if wrapped.scope != "model":
        raise NotApplicable("has buckets of its own")
    setup = Setup(wrapped, level, dtype=torch.float32)
    xs_W = gradients(dtype=torch.float32)
    promised = setup.payload()
    updates = setup(xs_W)
    demand([u.shape for u in updates] == [s.shape for s in SPECS], "scope=model gives updates of other shapes")
    names = list(setup.plan.levels)
    demand(names == (["model"] if wrapped.compressor.traits.knob else []), f"scope=model has levels for {names}")
    counted = setup.comm.ledger.counts["payload"]
    demand(counted <= promised, f"scope=model costs {counted} bytes instead of {promised}")
    cosine = float(torch.cosine_similarity(flat(updates), flat([x.mean(0) for x in xs_W]), dim=0))
    demand(cosine > 0, f"scope=model gives an update with cosine {cosine:.3f}")
    return f"cosine {cosine:.3f}, {counted // 4} B per worker"


def check_state(make: Maker, level: float | None = None) -> str:
    """After saving and loading a checkpoint into a new compressor, training continues bitwise equal.

    A checkpoint stores keys that end in `_W` per worker, and copies each worker's row into the tensor that `init`
    creates. Other keys are stored once and are equal in all processes.
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
