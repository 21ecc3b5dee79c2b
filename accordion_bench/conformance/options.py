"""The options that stand beside a compressor's own: levels, start_step, scope."""

import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.sizes import payload_bytes
from accordion_bench.compressors.traits import COLLECTIVES
from accordion_bench.conformance.subject import Maker, NotApplicable, Setup, demand, flat
from accordion_bench.conformance.tensors import SPECS, gradients
from accordion_bench.options.checks import ConfigError


def check_levels(make: Maker, level: float | None = None) -> str:
    """Values that the knob cannot take are refused in a sentence; of the pair, the strong level costs no more."""
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
    """Before `start_step` the update is that of a dense all-reduce, for its bytes, and no residual is kept."""
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
        for name, entries in setup.exchange.state.items():
            if "residual_W" in entries:
                kept = float(entries["residual_W"].abs().max()) if entries["residual_W"].numel() else 0.0
                demand(kept == 0, f"step {step} is dense, but leaves a residual of up to {kept:.2g} in {name}")
    counted, dense_bytes = setup.comm.ledger.counts["payload"], dense.ledger.counts["payload"]
    demand(counted == dense_bytes, f"two dense steps cost {counted} bytes instead of {dense_bytes}")
    updates = setup(gradients(step=2, dtype=torch.float32), 2)
    demand(bool(flat(updates).isfinite().all()), "the first compressed step gives NaN or infinity")
    return f"{dense_bytes // 8} B per worker and step, then {setup.payload(2) // 4} B"


def check_collectives(make: Maker, level: float | None = None) -> str:
    """Every declared collective carries the messages; the others are refused in a sentence."""
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
    """With `scope=model` all tensors travel as one vector of one level; refused where that makes no sense."""
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
