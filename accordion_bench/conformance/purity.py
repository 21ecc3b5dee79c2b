"""Checks with unusual inputs, and of side effects: only outputs and state change, and no hidden state matters."""

import math
import random
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.compressors.compressor import NonFinite
from accordion_bench.compressors.gathered import Gathered
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
    levels_of,
    max_relative_difference,
    plain,
    repeated,
    same_bits,
    same_state,
)
from accordion_bench.exchange.dry_exchange import probe_exchange
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo


def _finite(tensors: list[Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)


def check_zero(make: Maker, level: float | None = None) -> str:
    """Zero gradients give finite updates (zero if messages have a scale); the next non-zero gradient has an effect."""
    setup = Setup(make(), level)
    zeros_W = [torch.zeros_like(x) for x in gradients()]
    for step in range(2):
        updates = setup(zeros_W, step)
        demand(_finite(updates), f"zero gradients give an update with NaN or infinity in step {step}")
        if setup.compressor.traits.reduces == "mean" and setup.compressor.traits.scaled:
            largest = float(flat(updates).abs().max())
            demand(largest == 0, f"zero gradients give an update of up to {largest:.3g}")
    xs_W = gradients()
    updates = setup(xs_W, 2)
    cosine = float(torch.cosine_similarity(flat(updates), flat([x.mean(0) for x in xs_W]), dim=0))
    said = f"after zero gradients the update of the next gradient has cosine {cosine:.3f}"
    demand(_finite(updates) and cosine > 0, said)
    return f"cosine {cosine:.3f} of the next gradient"


def check_ties(make: Maker, level: float | None = None) -> str:
    """Gradients whose entries are all equal give finite updates with positive cosine, within the predicted bytes."""
    setup = Setup(make(), level, dtype=torch.float32)
    xs_W = [torch.full_like(x, 0.5) for x in gradients(dtype=torch.float32)]
    for step in range(2):
        before, promised = setup.comm.ledger.counts["payload"], setup.payload(step)
        updates = setup(xs_W, step)
        counted = setup.comm.ledger.counts["payload"] - before
        demand(_finite(updates), "entries that are all equal give an update with NaN or infinity")
        demand(counted <= promised, f"entries that are all equal cost {counted} bytes instead of {promised}")
    cosine = float(torch.cosine_similarity(flat(updates), flat([x[0] for x in xs_W]), dim=0))
    if setup.compressor.traits.reduces == "mean":
        demand(cosine > 0, f"entries that are all equal give an update with cosine {cosine:.3f}")
    return f"cosine {cosine:.3f}"


def check_shapes(make: Maker, level: float | None = None) -> str:
    """Tensors of one entry, and an empty list of tensors, are handled."""
    ones = [TensorSpec(f"one{d}", (1,) * d) for d in range(1, 5)]
    setup = Setup(make(), level, specs=ones)
    updates = setup([torch.full((4, *spec.shape), 2.0, dtype=torch.float64) for spec in ones])
    demand([u.shape for u in updates] == [s.shape for s in ones] and _finite(updates), "one entry: not finite")
    if setup.compressor.traits.reduces == "mean":
        demand(all(float(u) > 0 for u in updates), f"one entry: the update of 2 is {[float(u) for u in updates]}")
    nothing = Setup(make(), level, specs=[])
    demand(nothing([]) == [], "an empty list of tensors does not give an empty list of updates")
    sent = nothing.comm.ledger.counts["payload"]
    demand(sent == 0, f"an empty list of tensors costs {sent} bytes")
    return "handled"


def check_no_entries(make: Maker, level: float | None = None) -> str:
    """Tensors without entries are returned unchanged and do not affect other tensors."""
    rest = TensorSpec("rest", (6, 4))
    x_W = gradients([rest])[0]
    for shape in ((0,), (5, 0), (0, 5)):
        setup = Setup(make(), level, specs=[TensorSpec("none", shape), rest])
        updates = setup([torch.zeros(4, *shape, dtype=torch.float64), x_W])
        said = f"beside a tensor of shape {shape} and no entries, the update"
        demand([u.shape for u in updates] == [shape, rest.shape], f"{said} has other shapes")
        demand(_finite(updates) and bool((updates[1] != 0).any()), f"{said} is lost")
    return "handled"


def check_dtypes(make: Maker, level: float | None = None) -> str:
    """The update has the gradient's dtype, and equals that of float32 up to rounding to this dtype."""
    told = []
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        setup, twin = Setup(make(), level, dtype=dtype), Setup(make(), level, dtype=torch.float32)
        for step in range(2):
            xs_W = [x.to(dtype) for x in gradients(step=step, dtype=torch.float32)]
            updates, expected = setup(xs_W, step), twin([x.float() for x in xs_W], step)
            wrong = [u.dtype for u in updates if u.dtype != dtype]
            demand(not wrong, f"gradients of {dtype} give updates of {wrong[:1]}")
            if dtype == torch.float64:
                # random rounding may differ in single entries with wider arithmetic
                allowed = 0.01 if draws(setup.compressor) else 0.0
                largest = float(flat(expected).abs().max())
                apart = (flat(updates) - flat(expected)).abs() > (
                    1e-4 + setup.compressor.description.claims.sum_eps
                ) * largest
                said = f"{float(apart.double().mean()):.2%} of the entries differ between float64 and float32"
                demand(float(apart.double().mean()) <= allowed, f"{said} (allowed {allowed:.0%})")
            else:
                rounded = [e.to(dtype) for e in expected]
                same = all(same_bits(u, e) for u, e in zip(updates, rounded, strict=True))
                off = max_relative_difference([u.float() for u in updates], [e.float() for e in rounded])
                demand(same, f"gradients of {dtype} give an update that is {off:.2g} away from float32's, rounded")
        told.append(str(dtype).removeprefix("torch."))
    return ", ".join(told)


def check_non_finite(make: Maker, level: float | None = None) -> str:
    """NaN and infinity are refused with the parameter's name, before any state changes or any byte is sent.

    A one-shot encoder can still receive them, because error feedback may overflow. It must refuse them too, or
    propagate them to the update; a code that decodes to finite numbers would hide them.
    """
    setup, twin = Setup(make(), level), Setup(make(), level)
    for each in (setup, twin):
        each(gradients(), 0)
    state, counts = setup.snapshot(), dict(setup.comm.ledger.counts)
    for value in (math.nan, math.inf, -math.inf):
        xs_W = gradients(step=1)
        xs_W[3].view(4, -1)[2, 7] = value
        try:
            setup(xs_W, 1)
        except NonFinite as refused:
            told = str(refused)
            demand(SPECS[3].name in told and "worker 2" in told, f"{value} is refused without its place: {told}")
        else:
            raise AssertionError(f"a gradient of {value} is not refused")
        differs = same_state(setup.snapshot(), state)
        demand(differs is None, f"a refused {value} has changed {differs}")
        demand(setup.comm.ledger.counts == counts, f"a refused {value} was charged to the ledger")
    same = all(same_bits(a, b) for a, b in zip(setup(gradients(step=1), 1), twin(gradients(step=1), 1), strict=True))
    demand(same, "after a refused gradient the next update differs")
    if isinstance(bare(setup.compressor), Gathered):
        for value in (math.nan, math.inf):
            _not_hidden(Setup(plain(make), level), value)
    return "refused by name, state untouched"


def _not_hidden(setup: Setup, value: float) -> None:
    xs_W = gradients()
    xs_W[3][2] = value
    try:
        updates, _ = setup.contributions(xs_W)
    except (NonFinite, RuntimeError):
        return
    said = f"encode packs {value} into a code that decodes to finite numbers; raise NonFiniteRow instead"
    demand(not _finite(updates), said)


def check_extremes(make: Maker, level: float | None = None) -> str:
    """Gradients of about 1e30 and of about 1e-30 in float32 give finite updates and finite state."""
    told = []
    for factor in (1e30, 1e-30):
        setup = Setup(make(), level, dtype=torch.float32)
        for step in range(3):
            xs_W = [x * factor for x in gradients(step=step, dtype=torch.float32)]
            updates = setup(xs_W, step)
            demand(_finite(updates), f"gradients of {factor:g} give an update with NaN or infinity in step {step}")
        for name, entries in setup.exchange.state.items():
            kept = [value for value in entries.values() if isinstance(value, Tensor) and value.is_floating_point()]
            demand(_finite(kept), f"gradients of {factor:g} leave NaN or infinity in the state of {name}")
        mean = flat([x.double().mean(0) for x in xs_W])
        told.append(f"{factor:g}: norm ratio {float(flat(updates).double().norm() / mean.norm()):.2g}")
    return ", ".join(told)


def check_inputs(make: Maker, level: float | None = None) -> str:
    """The gradients are not modified."""
    setup = Setup(make(), level)
    for step in range(2):
        xs_W = gradients(step=step)
        setup(xs_W, step)
        for spec, x_W, before_W in zip(SPECS, xs_W, gradients(step=step), strict=True):
            changed = int((x_W != before_W).sum())
            demand(changed == 0, f"the exchange has changed {changed} entries of the gradient of {spec.name}")
    return "untouched"


def check_global_rng(make: Maker, level: float | None = None) -> str:
    """The global generators of torch, numpy and Python are neither advanced nor seeded."""

    def states() -> dict[str, object]:
        words, *rest = [*np.random.get_state()][1:]
        return {
            "torch": torch.get_rng_state().tolist(),
            "numpy": (np.asarray(words).tolist(), rest),
            "python": random.getstate(),
        }

    torch.rand(1), np.random.random(), random.random()  # advance them, so that seeding them again changes their state
    before = states()
    setup = Setup(make(), level)
    for step in range(2):
        setup(gradients(step=step), step)
    probe_exchange(setup.exchange, gradients(), StepInfo(setup.plan, 2, epoch=1000.0))
    for name, state in states().items():
        demand(
            state == before[name],
            f"the global random generator of {name} has moved; draw from accordion_bench.tensors.keyed_rng",
        )
    return "torch, numpy and python untouched"


def check_probe(make: Maker, level: float | None = None) -> str:
    """`probe` predicts loss and cost of an exchange, changes no bit of the state and sends nothing."""
    setup, twin = Setup(make(), level), Setup(make(), level)
    for each in (setup, twin):
        each(gradients(), 0)
    state, counts = setup.snapshot(), dict(setup.comm.ledger.counts)
    xs_W = gradients(step=1)
    probe = probe_exchange(setup.exchange, xs_W, StepInfo(setup.plan, 1, epoch=1000.0))
    differs = same_state(setup.snapshot(), state)
    demand(differs is None, f"probe() has changed {differs}")
    demand(setup.comm.ledger.counts == counts, "probe() was charged to the ledger")
    untouched = all(torch.equal(a, b) for a, b in zip(xs_W, gradients(step=1), strict=True))
    demand(untouched, "probe() has changed the gradients")
    good = all(0 <= error < float("inf") for error in probe.error)
    demand(good, f"probe() gives the errors {probe.error}")
    cost, promised = round(4 * sum(probe.payload_bytes)), setup.mean_payload(1)
    demand(cost == promised, f"probe() prices a step at {cost} bytes, payload_bytes at {promised}")
    same = all(same_bits(a, b) for a, b in zip(setup(xs_W, 1), twin(xs_W, 1), strict=True))
    demand(same, "after probe() the next update differs")
    # as one of two processes, where any communication would wait forever
    part = Setup(make(), level, comm=Comm(2, processes=2, rank=1))
    probe_exchange(part.exchange, [x[2:] for x in xs_W], StepInfo(part.plan, 0, epoch=1000.0))
    return f"error up to {max(probe.error):.3g}"


def check_put_back(make: Maker, level: float | None = None) -> str:
    """Reverting an exchange restores the state; elastic runs revert and repeat it when a worker is lost."""
    setup, twin = Setup(make(), level), Setup(make(), level)
    for step in range(3):
        before, put_back = setup.snapshot(), setup.exchange.keep()
        setup(gradients(step=step + 3), step)
        put_back()
        differs = same_state(setup.snapshot(), before)
        demand(differs is None, f"the state restored in step {step} differs in {differs}")
        pairs = zip(SPECS, setup(gradients(step=step), step), twin(gradients(step=step), step), strict=True)
        for spec, a, b in pairs:
            demand(same_bits(a, b), f"the repeated exchange of step {step} gives another update of {spec.name}")
    return "repeated to the bit"


def check_order(make: Maker, level: float | None = None) -> str:
    """Results do not depend on the order of the tensors."""
    order = [5, 3, 7, 6, 0, 4, 2, 1]
    if make().scope != "tensor" or make().block_size:
        raise NotApplicable("tensors travel together")
    setup, shuffled = Setup(make(), level), Setup(make(), level, specs=[SPECS[i] for i in order])
    worst = 0.0
    for step in range(3):
        xs_W = gradients(step=step)
        updates = setup(xs_W, step)
        again = shuffled([xs_W[i].clone() for i in order], step)
        for position, i in enumerate(order):
            off = max_relative_difference([again[position]], [updates[i]])
            demand(off <= 1e-10, f"in another order the update of {SPECS[i].name} is off by {off:.2g} in step {step}")
            worst = max(worst, off)
    return f"off by {worst:.1e}"


def check_neighbours(make: Maker, level: float | None = None) -> str:
    """A tensor's update does not depend on the level of another tensor, even after that level has changed."""
    if make().scope != "tensor" or make().block_size:
        raise NotApplicable("tensors travel together")
    own = make().compressor.level if level is None else level
    others: list[float] = [value for value in levels_of(make, more=True) if value is not None and value != own]
    if not others:
        raise NotApplicable("no other level")
    for other in (min(others), max(others)):
        setup, twin = Setup(make(), level), Setup(make(), level)
        values = (*twin.exchange.ladder.values, other)
        twin.exchange.ladder = replace(twin.exchange.ladder, values=values)
        for step in range(4):
            if step in (1, 3):
                twin.plan = twin.plan.with_levels({"a": step % 3})
            updates, again = setup(gradients(step=step), step), twin(gradients(step=step), step)
            for spec, a, b in zip(SPECS, updates, again, strict=True):
                off = max_relative_difference([b], [a])
                said = f"with another tensor's level at {other:g}, the update of {spec.name} in step {step} is off by"
                demand(spec.name == "a" or off <= 1e-6, f"{said} {off:.2g}")
    return f"unmoved by {min(others):g} and {max(others):g}"


def check_same_key(make: Maker, level: float | None = None) -> str:
    """Two new compressors with the same seed, steps and gradients give equal bits."""
    setup, twin = Setup(make(), level), Setup(make(), level)
    for step in range(3):
        first, second = setup(gradients(step=step), step), twin(gradients(step=step), step)
        for spec, a, b in zip(SPECS, first, second, strict=True):
            off = max_relative_difference([a], [b])
            demand(
                same_bits(a, b), f"the same step gives another update of {spec.name} the second time, off by {off:.2g}"
            )
    return "equal bits"


def check_draws(make: Maker, level: float | None = None) -> str:
    """Random numbers differ by step, seed, tensor, and by worker if declared; without any, messages are equal."""
    kind = draws(plain(make).compressor)
    if not kind:
        two_way = plain(make).collective == "two_way"
        sent_W = _sent(make, level)
        off = max(max_relative_difference([s_W[w]], [s_W[0]]) for s_W in sent_W for w in range(1, 4))
        said = f"workers send different messages of the same gradient, off by {off:.2g}, without declaring draws"
        demand(off <= 1e-9, said)
        return "none, workers send the same" + (" to the owners" if two_way else "")
    sent_W = _sent(make, level)
    if max(max_relative_difference([s_W[0]], [x[0]]) for s_W, x in zip(sent_W, _same(), strict=False)) <= 1e-6:
        return "nothing is lost, nothing to draw"
    workers_differ = any(not same_bits(s_W[0], s_W[1]) for s_W in sent_W)
    demand(
        workers_differ == (kind == "worker"),
        f"workers draw {'different' if workers_differ else 'the same'} numbers, but declare draws={kind!r}",
    )
    for what, other_W in (("step", _sent(make, level, step=1)), ("seed", _sent(make, level, seed=4))):
        differ = any(not same_bits(a[0], b[0]) for a, b in zip(sent_W, other_W, strict=True))
        demand(differ, f"another {what} draws the same numbers")
    if plain(make).scope == "tensor" and plain(make).collective != "two_way":
        demand(not same_bits(sent_W[1][0], sent_W[3][0]), "equal gradients of two tensors draw the same numbers")
    return f"per {kind}" if kind == "worker" else "shared by the workers"


def _same() -> list[Tensor]:
    """Return gradients that are equal on all workers, and equal in three tensors of one shape."""
    xs = [x[0] for x in gradients()]
    xs[3], xs[4] = xs[1], xs[1]
    return repeated(xs, 4)


def _sent(make: Maker, level: float | None, step: int = 0, seed: int = 3) -> list[Tensor]:
    """Return each worker's contribution to the update of equal gradients, [W, ...]."""
    return Setup(plain(make), level, seed=seed).contributions(_same(), step)[1]


def check_permutation(make: Maker, level: float | None = None) -> str:
    """A permutation of the workers' gradients changes only rounding."""
    if draws(plain(make).compressor) == "worker":
        raise NotApplicable("each worker draws its own numbers")
    if make().collective == "tree":
        raise NotApplicable("another order of the workers gives another tree")
    setup, permuted, worst = Setup(make(), level), Setup(make(), level), 0.0
    for step in range(2):
        xs_W = gradients(step=step)
        updates, again = setup(xs_W, step), permuted([x[[2, 0, 3, 1]] for x in xs_W], step)
        worst = max_relative_difference(again, updates)
        rounding = 4 * (step + 1) * setup.compressor.description.claims.sum_eps + 1e-9
        demand(worst <= rounding, f"with the workers in another order the update is off by {worst:.2g} in step {step}")
    return f"off by {worst:.1e}, norm {float(flat(updates).norm()):.3g}"
