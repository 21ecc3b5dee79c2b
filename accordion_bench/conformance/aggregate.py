"""Checks of messages: bytes, levels, options and state; the update is their mean, and error feedback loses nothing.

Tensor suffixes: W local workers, N elements.
"""

import io
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.assemble import CompressorSetup
from accordion_bench.compressors.description import COLLECTIVES
from accordion_bench.compressors.error_feedback import FLOATS, ErrorFeedback
from accordion_bench.compressors.probe import payload_bytes
from accordion_bench.compressors.two_way import TwoWay
from accordion_bench.conformance.subject import (
    SPECS,
    Maker,
    NotApplicable,
    Setup,
    bare,
    demand,
    draws,
    flat,
    gradients,
    kept_residuals,
    layers,
    levels_of,
    max_relative_difference,
    plain,
    real_gradients,
    repeated,
    same_bits,
)
from accordion_bench.exchange.dry_exchange import probe_exchange
from accordion_bench.options.checks import ConfigError
from accordion_bench.position import StepInfo
from accordion_bench.sync.scheme import PER_WORKER

ROUNDING = 1e-10  # relative error of sums in float64
ROUNDED = 1.001 / 253  # relative to a block's largest number: half a step of int8, plus the rounding of its scale
LRS = (1.0, 0.5, 2.0, 0.125)
SMALLEST, LARGEST = 0.1, 3.0  # norm ratios allowed without a declaration


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


def check_mean(make: Maker, level: float | None = None) -> str:
    """The update is the mean of the workers' decoded messages."""
    wrapped = plain(make)
    _reduces_by_mean(wrapped)
    if wrapped.collective == "two_way":
        raise NotApplicable("the owners compress the mean again; see telescopes")
    worst = 0.0
    for workers in (1, 4):
        setup = Setup(plain(make), level, workers)
        for step in range(2):
            updates, sent_W = setup.contributions(gradients(workers=workers, step=step), step)
            for spec, update, sent in zip(setup.exchange.sent, updates, sent_W, strict=True):
                said = f"the update of {spec.name} has shape {tuple(update.shape)}, not {spec.shape}"
                demand(update.shape == spec.shape, said)
                off = max_relative_difference([update], [sent.mean(0)])
                demand(
                    off <= workers * wrapped.compressor.description.claims.sum_eps + ROUNDING,
                    f"the update of {spec.name} is {off:.2g} of its largest entry away from the mean of what "
                    f"{workers} workers have sent (norms {float(update.norm()):.4g} and "
                    f"{float(sent.mean(0).norm()):.4g})",
                )
                worst = max(worst, off)
    return f"off by {worst:.1e}"


def check_identical(make: Maker, level: float | None = None) -> str:
    """Four workers with one gradient give the update of one; if nothing is lost, the update is the gradient."""
    wrapped = plain(make)
    compressor = wrapped.compressor
    _reduces_by_mean(wrapped)
    rounding = 4 * compressor.description.claims.sum_eps + 1e-6
    alike = draws(compressor) != "worker" and wrapped.collective != "two_way"
    told = []
    for kind, xs in (("gradient", [x[0] for x in gradients()]), ("of rank 1", _rank_one())):
        setup = Setup(plain(make), level, 4)
        lost = max(probe_exchange(setup.exchange, repeated(xs, 4), StepInfo(setup.plan, 0, epoch=1000.0)).error)
        updates = setup(repeated(xs, 4))
        if alike:
            alone = Setup(plain(make), level, 1)([x[None] for x in xs])
            off = max_relative_difference(updates, alone)
            said = f"four workers with the same {kind} get another update than one: off by {off:.2g}"
            demand(off <= rounding, said)
        if lost <= 1e-12:
            off = max_relative_difference(updates, xs)
            demand(
                off <= rounding,
                f"nothing is lost of this {kind}, says the probe, but it is back off by {off:.2g}",
            )
        told.append(f"{kind}: {'comes back' if lost <= 1e-12 else f'loses up to {lost:.2g}'}")
    return ", ".join(told)


def _rank_one() -> list[Tensor]:
    full = [x[0] for x in gradients()]
    outer = [x.reshape(x.shape[0], -1) for x in full]
    return [(y[:, :1] @ y[:1]).view(x.shape) for x, y in zip(full, outer, strict=True)]


def _reduces_by_mean(wrapped: CompressorSetup) -> None:
    if wrapped.compressor.traits.reduces != "mean":
        raise NotApplicable(f"reduces by {wrapped.compressor.traits.reduces}")


def check_telescopes(make: Maker, level: float | None = None) -> str:
    """Sum of updates + mean of residuals (+ the owners' residuals) = sum of mean gradients, while lr and level change.

    Residuals stored in eight bits lose at most half a step of their scale in each exchange.
    """
    told, why = [], ""
    if make().compressor.traits.reduces == "estimate":
        raise NotApplicable("reduces by estimate; see estimates")
    for residual in ("local", "aggregate"):
        try:
            setup = Setup(make(error_feedback=True, residual=residual, worker_momentum=False), level)
        except ConfigError as refused:
            why = str(refused)
            continue
        two_way = any(isinstance(layer, TwoWay) for layer in layers(setup.compressor))
        if not any(isinstance(layer, ErrorFeedback) for layer in layers(setup.compressor)):
            why = "no error feedback"
        elif not (two_way and residual == "aggregate"):  # e_w then already contains the owners' residuals
            told.append(f"{residual}: off by {_telescope(setup, make, level):.1e}")
    if not told:
        raise NotApplicable(why)
    return ", ".join(told)


def _telescope(setup: Setup, make: Maker, level: float | None) -> float:
    exchange, other = setup.exchange, _other_level(setup, make, level)
    total = [torch.zeros(spec.shape, dtype=torch.float64) for spec in exchange.sent]
    target, largest, rounded = [t.clone() for t in total], 0.0, [0.0] * len(total)
    for step, lr in enumerate(LRS):
        _put_level(setup, other if step == 1 else 0)
        updates, _ = setup.contributions(gradients(step=step), step, lr)
        for i, x_W in enumerate(exchange.as_sent(gradients(step=step))):
            total[i] += updates[i]
            target[i] += x_W.mean(0) * (lr if setup.compressor.traits.optimizer.units == "parameter" else 1)
            largest = max(largest, float(target[i].abs().max()))
        kept_W, eight = kept_residuals(setup)
        for i, e_W in kept_W.items():
            rounded[i] += eight * ROUNDED * float(e_W.abs().max())
    owners, worst = owners_residuals(setup), 0.0
    for i, spec in enumerate(exchange.sent):
        if i in kept_W:
            total[i] += kept_W[i].mean(0)
        if spec.name in owners:
            total[i] += owners[spec.name].view(spec.shape)
        off = float((total[i] - target[i]).abs().max()) / largest
        said = f"sum of updates + residuals of {spec.name} differs from the sum of mean gradients by {off:.2g}"
        allowed = len(LRS) * 4 * setup.compressor.description.claims.sum_eps + ROUNDING + rounded[i] / largest
        demand(off <= allowed, f"{said} of the largest entry")
        worst = max(worst, off)
    return worst


def owners_residuals(setup: Setup) -> dict[str, Tensor]:
    """Return the residuals of the owners in a two-way exchange, as one vector [N] per tensor."""
    two_way = next((layer for layer in layers(setup.compressor) if isinstance(layer, TwoWay)), None)
    if two_way is None:
        return {}
    state = setup.exchange.state
    kept = {name: state[key]["residual_W"] for name, key in two_way.kept_in.items() if key in state}
    return {
        name: torch.cat([kept_W[p.owner, p.offset : p.offset + p.stop - p.start] for p in two_way.pieces[name]])
        for name, kept_W in kept.items()
    }


def check_estimates(make: Maker, level: float | None = None) -> str:
    """With EF21, every update is the mean of the workers' estimates, while the level changes."""
    try:
        setup = Setup(make(error_feedback="ef21", worker_momentum=False), level)
    except ConfigError as refused:
        raise NotApplicable(str(refused)) from None
    other, worst = _other_level(setup, make, level), 0.0
    for step in range(len(LRS)):
        _put_level(setup, other if step == 1 else 0)
        updates, estimates_W = setup.contributions(gradients(step=step), step)
        for spec, update, estimate_W in zip(setup.exchange.sent, updates, estimates_W, strict=True):
            off = max_relative_difference([update], [estimate_W.mean(0)])
            said = f"in step {step} the update of {spec.name} is {off:.2g} of its largest entry away from the mean"
            demand(off <= ROUNDING, f"{said} of the workers' own estimates")
            worst = max(worst, off)
    return f"off by {worst:.1e}"


def _other_level(setup: Setup, make: Maker, level: float | None) -> int:
    """Add another level to the ladder and return its index; 0 if there is none."""
    own, ladder = make().compressor.level if level is None else level, setup.exchange.ladder
    other = next((value for value in reversed(levels_of(make)) if value != own), None)
    if other is None:
        return 0
    setup.exchange.ladder = replace(ladder, values=(*ladder.values, other))
    return 1


def _put_level(setup: Setup, index: int) -> None:
    setup.plan = setup.plan.with_levels(dict.fromkeys(setup.plan.levels, index))


def check_fidelity(make: Maker, level: float | None = None) -> str:
    """Cosine and norm ratio of the first update to the true mean, for gradients of a residual network on real images.

    Compressors that reduce by mean must have cosine > 0, and a norm ratio from 0.1 to 3 or within the wider bounds of
    the declared contraction (norm ratio sqrt(delta) of a projection) and variance (||update||^2 <= mean of ||x_w||^2 +
    variance).
    """
    specs, xs_W = real_gradients()
    setup = Setup(make(), level, 4, specs, dtype=torch.float32)
    update = flat(setup([x.clone() for x in xs_W]))
    mean = flat([x.mean(0) for x in xs_W])
    cosine = float(torch.cosine_similarity(update, mean, dim=0))
    ratio = float(update.norm() / mean.norm())
    said = f"cosine {cosine:.3f}, norm ratio {ratio:.3f}"
    demand(math.isfinite(cosine) and math.isfinite(ratio), f"{said} on real gradients")
    if setup.compressor.traits.reduces == "mean":
        demand(cosine > 0, f"{said} on real gradients: the update does not point along the mean gradient")
        if setup.compressor.traits.scaled:
            low, high = _limits(setup, xs_W, float(mean.norm()))
            limits = f"declared or plausible are {low:.3g} to {high:.3g}"
            demand(low <= ratio <= high, f"{said} on real gradients: {limits}")
    return said


def _limits(setup: Setup, xs_W: tuple[torch.Tensor, ...], norm: float) -> tuple[float, float]:
    inner, ctx = bare(setup.compressor), setup.context()
    claims = inner.description.claims
    deltas, square = [], 0.0
    for spec, level, x_W in zip(ctx.specs, ctx.levels, setup.exchange.as_sent(xs_W), strict=True):
        rows_W = x_W.flatten(1).double()
        square += float(rows_W.square().sum(1).mean())
        if level is None or not setup.compressor.compresses(spec, level):
            continue
        delta = claims.contraction(inner, spec, level)
        variance = claims.variance(inner, rows_W, spec, level, ctx)
        if delta is not None:
            deltas.append(delta)
        if variance is not None:
            square += float(variance.mean())
    low = min(SMALLEST, math.sqrt(max(0.0, min(deltas, default=1.0))) / 3)
    return low, max(LARGEST, LARGEST * math.sqrt(square) / norm)
