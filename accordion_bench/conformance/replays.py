"""What says that a GPU may repeat its exchange computes the same when it is repeated."""

import contextlib
from collections.abc import Callable, Hashable
from typing import Any

import torch

from accordion_bench.comm.graphs import CapturedWork, NotCapturable, eagerly
from accordion_bench.conformance.pretend_device import DEVICE, pretended
from accordion_bench.conformance.subject import LATE, Maker, NotApplicable, Setup, demand, same_bits, same_state
from accordion_bench.conformance.tape import TapeGraphs
from accordion_bench.conformance.tensors import gradients
from accordion_bench.position import StepInfo

EAGER, REPLAYED = 3, 4  # steps
CLAIMS = "it says replays=True, but"


def check_replays(make: Maker, level: float | None = None) -> str:
    """Captured exchanges, repeated with other gradients, steps and rates, equal eager ones to the bit.

    On a pretended device, with a tape in the place of a GPU's graphs.
    """
    if not make().compressor.traits.replays:
        raise NotApplicable("it does not say that a GPU may repeat its exchange")
    with pretended(), torch.no_grad():
        return _compared(make, level)


def _compared(make: Maker, level: float | None) -> str:
    eager, taped = (Setup(make(), level, dtype=torch.float32, device=str(DEVICE)) for _ in range(2))
    places = [x_W.to(DEVICE) for x_W in gradients(dtype=torch.float32)]
    turns = taped.compressor.traits.cycle
    captured: dict[Hashable, tuple[Callable[[Any], None], list[torch.Tensor]]] = {}  # one for each turn
    for step in range(EAGER + REPLAYED):
        given = [x_W.to(DEVICE) for x_W in gradients(step=step, dtype=torch.float32)]
        info = StepInfo(taped.plan, step, 0.1 / (step + 1), LATE)
        torch._foreach_copy_(places, given)
        work = taped.exchange.work(places, info)
        if step < EAGER:
            eagerly(work)
        elif work.key not in captured:
            demand(len(captured) < turns, f"{CLAIMS} its state lies elsewhere in each step")
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
    """What repeats the work, with what the host counts beside it, and the updates that it leaves."""
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
