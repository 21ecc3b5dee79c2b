"""Checks on a GPU or simulated device: results equal the CPU's, few launches, replays equal eager exchanges."""

import contextlib
import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.graphs import CapturedWork, NotCapturable, eagerly
from accordion_bench.conformance.pretend_device import DEVICE, Counts, pretended
from accordion_bench.conformance.stand_ins import TapeGraphs, echoed
from accordion_bench.conformance.subject import (
    LATE,
    Maker,
    NotApplicable,
    Setup,
    demand,
    draws,
    flat,
    gradients,
    same_bits,
    same_state,
)
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.tensors import keyed_rng


def check_devices(make: Maker, level: float | None = None, device: str = "cuda") -> str:
    """Three steps on the GPU equal those on the CPU up to rounding, with equal bytes in the ledger.

    Without a GPU a simulated device is used, on which the device's code branches run with real numbers.
    """
    if device == "cuda" and not torch.cuda.is_available():
        with pretended():
            return check_devices(make, level, str(DEVICE)) + "; there is no GPU, so the device is simulated"
    here, there = Setup(make(), level, dtype=torch.float32), Setup(make(), level, dtype=torch.float32, device=device)
    worst = 0.0
    for step in range(3):
        xs_W = gradients(step=step, dtype=torch.float32)
        ours, theirs = flat(here(xs_W, step)), flat([u.cpu() for u in there([x.to(device) for x in xs_W], step)])
        allowed = 0.01 if draws(here.compressor) else 0.0  # random rounding may differ in single entries
        rounding = 1e-4 + 4 * (step + 1) * here.compressor.description.claims.sum_eps
        apart = float(((ours - theirs).abs() > rounding * ours.abs().max()).double().mean())
        demand(apart <= allowed, f"{apart:.2%} of the entries differ between CPU and {device} in step {step}")
        worst = max(worst, apart)
    demand(here.comm.ledger.counts == there.comm.ledger.counts, f"{device} sends other bytes than the CPU")
    return f"{worst:.2%} of the entries differ"


WORKERS = 8
WARM = 2  # exchanges before the counted one, because tables are uploaded once


def count_launches(make: Maker, specs: Sequence[TensorSpec], workers: int = WORKERS) -> Counts:
    """Count the device operations of one exchange of all tensors in one bucket, in one of `workers` processes."""
    generator = keyed_rng.generator("launches")
    with pretended() as counts, echoed(workers):
        comm = Comm(1, workers, device=str(DEVICE))
        setup = Setup(make(), specs=specs, dtype=torch.float32, device=str(DEVICE), comm=comm)
        for step in range(WARM + 1):
            xs_W = [torch.randn(1, *spec.shape, generator=generator).to(DEVICE) for spec in specs]
            counts.reset()
            setup(xs_W, step)
    return copy.deepcopy(counts)


EAGER, REPLAYED = 3, 4  # steps
CLAIMS = "it says replays=True, but"


def check_replays(make: Maker, level: float | None = None) -> str:
    """Captured exchanges, replayed with other gradients, steps and learning rates, are bitwise equal to eager ones.

    Runs on a simulated device, with a tape instead of CUDA graphs.
    """
    if not make().compressor.traits.replays:
        raise NotApplicable("it does not declare that a GPU may replay its exchange")
    with pretended(), torch.no_grad():
        return _compared(make, level)


def _compared(make: Maker, level: float | None) -> str:
    eager, taped = (Setup(make(), level, dtype=torch.float32, device=str(DEVICE)) for _ in range(2))
    places = [x_W.to(DEVICE) for x_W in gradients(dtype=torch.float32)]
    turns = taped.compressor.traits.cycle
    captured: dict[Hashable, tuple[Callable[[Any], None], list[torch.Tensor]]] = {}  # one for each turn of the cycle
    for step in range(EAGER + REPLAYED):
        given = [x_W.to(DEVICE) for x_W in gradients(step=step, dtype=torch.float32)]
        info = StepInfo(taped.plan, step, 0.1 / (step + 1), LATE)
        torch._foreach_copy_(places, given)
        work = taped.exchange.work(places, info)
        if step < EAGER:
            eagerly(work)
        elif work.key not in captured:
            demand(len(captured) < turns, f"{CLAIMS} its state has another address in each step")
            captured[work.key] = _captured(taped, work)
        replay, updates = captured.get(work.key, (None, []))
        if replay is not None:
            replay(work.moment)
        taped.exchange.finite.refuse()
        expected, where = eager(given, step, 0.1 / (step + 1)), f"in step {step - EAGER + 1} after the capture"
        if replay is not None:
            pairs = zip(updates, expected, eager.exchange.specs, strict=True)
            wrong = [spec.name for ours, theirs, spec in pairs if not same_bits(ours.cpu(), theirs.cpu())]
            demand(not wrong, f"{CLAIMS} the update of {', '.join(wrong)} differs from the eager one {where}")
            differs = same_state(_on_cpu(taped), _on_cpu(eager))
            demand(differs is None, f"{CLAIMS} its state differs from the eager one {where}: {differs}")
    demand(taped.comm.ledger.counts == eager.comm.ledger.counts, f"{CLAIMS} replays are charged with other bytes")
    return f"{REPLAYED} replays have the bits of eager exchanges"


def _captured(setup: Setup, work: CapturedWork) -> tuple[Callable[[Any], None], list[torch.Tensor]]:
    """Return a function that replays the work together with the host's counting, and the updates it writes."""
    exchange = setup.exchange
    with contextlib.ExitStack() as stack:
        records = (setup.comm.ledger, setup.comm.clock, exchange.finite)
        deferred = [stack.enter_context(record.deferred()) for record in records]
        try:
            repeat, updates = TapeGraphs().capture(work.stages[0].run, work.name)
        except NotCapturable as reason:
            raise AssertionError(f"{CLAIMS} it cannot be captured: {reason}") from None

    def replay(moment: Any) -> None:
        repeat(moment)
        for counted in deferred:
            for again in counted:
                again()

    return replay, updates


def _on_cpu(setup: Setup) -> dict[str, dict[str, object]]:
    return {
        name: {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in entries.items()}
        for name, entries in setup.snapshot().items()
    }
