"""Checks of side effects: a compressor modifies only its own outputs and state, and depends on no hidden state."""

import random
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.conformance.subject import (
    SPECS,
    Maker,
    NotApplicable,
    Setup,
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
from accordion_bench.position import StepInfo


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
    """Return each worker's contribution to the update for these gradients, [W, ...]."""
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
