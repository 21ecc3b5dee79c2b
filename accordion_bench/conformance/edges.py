"""Checks with unusual inputs: zeros, ties, tiny shapes, half precision, NaN, huge and tiny numbers."""

import math

import torch
from torch import Tensor

from accordion_bench.compressors.compressor import NonFinite
from accordion_bench.compressors.gathered import Gathered
from accordion_bench.conformance.subject import (
    SPECS,
    Maker,
    Setup,
    bare,
    demand,
    draws,
    flat,
    gradients,
    max_relative_difference,
    plain,
    same_bits,
    same_state,
)
from accordion_bench.plan import TensorSpec


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
