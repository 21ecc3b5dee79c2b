"""Exchanges of scripts/gpu/replay.py: every compressor, operation by operation and replayed; bits, times, kernels."""

import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import yaml
from torch import Tensor

from accordion_bench.comm.graphs import Graphs, eagerly, graphs_of
from accordion_bench.conformance.placement import TapeGraphs
from accordion_bench.conformance.pretend_device import DEVICE, pretended
from accordion_bench.conformance.subject import SPECS, Make, Setup, from_yaml, same_bits, same_state
from accordion_bench.options.conf_dir import yaml_files
from accordion_bench.plan import TensorSpec
from accordion_bench.position import StepInfo
from accordion_bench.training.replayed import Replayed
from scripts.bench import codec
from scripts.bench.harness import in_rounds, seconds_of

MILLIONS = (11, 25, 138)
ROUND = 0.01  # seconds of one arm in one round, about
SLOW = 0.1  # seconds of an exchange of 25 million; a method that takes longer is not tried on more
STEPS = 7  # that are compared; the first three are eager in both
TOLD = 4  # kernels of a replay that a row tells


def measured(cuda: bool, rounds: int, seconds: float, names: list[str]) -> tuple[list[list[object]], dict[str, Any]]:
    """Rows of a table and facts.

    Args:
        cuda: on a GPU; else on a pretended device, with a tape, as small as it goes.
        rounds: interleaved.
        seconds: after these no further compressor is begun.
        names: of compressors, see `maker`; none = all.
    """
    device = torch.device("cuda" if cuda else DEVICE)
    rows: list[list[object]] = []
    facts: dict[str, Any] = {}
    end, slow = time.monotonic() + seconds, set[str]()
    for millions in MILLIONS if cuda else (0,):
        specs = codec.shapes(millions, flat=False) if cuda else list(SPECS)
        drawn = codec.gradients(specs, "cuda" if cuda else "cpu")
        for name in names or sorted(yaml_files("compressor")):
            if name in slow or time.monotonic() > end:
                rows.append([millions, name, "too slow" if name in slow else "not reached", *[""] * 5])
                continue
            try:
                with torch.no_grad(), contextlib.nullcontext() if cuda else pretended():
                    found = one(name, specs, [x_W.to(device) for x_W in drawn], rounds)
            except Exception as error:
                found = {"differs": f"{type(error).__name__}: {error}".splitlines()[0]}
            if min(found.get("eager", 1.0), found.get("replayed", 1.0)) > SLOW:
                slow.add(name)
            facts[f"{millions} M, {name}"] = found
            rows.append([millions, name, *_told(found)])
    return rows, facts


HEADS = ["million", "compressor", "eager, µs", "replayed, µs", "in copies", "bits", "slowest kernels, µs", "launched"]


def _told(found: dict[str, Any]) -> list[object]:
    times = [f"{1e6 * found[key]:.0f}" if found.get(key) else "" for key in ("eager", "replayed")]
    least = found.get("replayed") or found.get("eager")
    copies = f"{least / found['copy']:.2f}" if least and found.get("copy") else ""
    started = found.get("kernels", [])
    slowest = ", ".join(f"{kernel[:40]} x {count}: {us:.0f}" for kernel, count, us in started[:TOLD])
    return [*times, copies, found.get("differs") or found["bits"], slowest, sum(count for _, count, _ in started)]


def maker(name: str) -> Make:
    """Return the maker of a compressor, by the name of its file and options: `topk:chunk=64`."""
    of, *options = name.split(":")
    return from_yaml(of, **{key: yaml.safe_load(value) for key, _, value in (one.partition("=") for one in options)})


class Arm:
    """One compressor with gradients in their places, ready for one exchange after another.

    Args:
        name: see `maker`.
        specs: the tensors.
        given: their gradients [1, ...].
        replays: whether exchanges are replayed where its method allows it.
    """

    def __init__(self, name: str, specs: list[TensorSpec], given: list[Tensor], replays: bool) -> None:
        device = given[0].device
        self.setup = Setup(maker(name)(), workers=1, specs=specs, dtype=torch.float32, device=str(device))
        self.given, self.xs_W = given, [x_W.clone() for x_W in given]
        exchange, comm = self.setup.exchange, self.setup.comm
        made = graphs_of(device) if device.type == "cuda" else TapeGraphs()
        self.graphs: Graphs = made if replays and exchange.replays else Graphs()
        self.replayed = Replayed(self.graphs, (comm.ledger, comm.clock, exchange.finite))
        self.step = 0

    def refill(self) -> None:
        """Other gradients in the same places."""
        torch._foreach_copy_(self.xs_W, self.given)
        torch._foreach_mul_(self.xs_W, 1 + 0.25 * (self.step % 3))

    def __call__(self) -> list[Tensor]:
        """One exchange, which is not waited for."""
        exchange = self.setup.exchange
        self.step += 1
        info = StepInfo(self.setup.plan, self.step, 0.1 / (1 + self.step), 1000.0)
        work = exchange.work(self.xs_W, info)
        out = self.replayed(work) if self.graphs.captures else eagerly(work)
        exchange.finite.forget()  # they are read once in a step, by whoever trains
        return out


def one(name: str, specs: list[TensorSpec], given: list[Tensor], rounds: int) -> dict[str, Any]:
    """Of one compressor: whether replays have the bits of eager exchanges; then seconds of both beside a copy."""
    eager, replayed = (Arm(name, specs, given, replays) for replays in (False, True))
    cuda = given[0].device.type == "cuda"
    captures = replayed.graphs.captures
    with eager.graphs.training(), replayed.graphs.training():
        differs = _compare(eager, replayed)
        reason = "; ".join(f"eager: {why}" for why in replayed.replayed.eager.values())
        bits = "the same" if captures else "never replayed"
        found: dict[str, Any] = {"differs": differs or reason, "bits": bits}
        target = [torch.empty_like(x_W) for x_W in eager.xs_W]
        arms: dict[str, Callable[[], object]] = {"copy": lambda: torch._foreach_copy_(target, eager.xs_W)}
        arms["eager"] = eager
        if captures and not replayed.replayed.eager:
            arms["replayed"] = replayed
        found |= {arm: statistics.median(own) for arm, own in _timed(arms, cuda, rounds).items()}
        if cuda:
            found["kernels"] = kernels(arms.get("replayed", eager))
    return found


def _compare(eager: Arm, replayed: Arm) -> str:
    """The first difference of updates or states; "" = none."""
    for step in range(STEPS):
        for arm in (eager, replayed):
            arm.refill()
        theirs, ours = eager(), replayed()
        for spec, a, b in zip(eager.setup.exchange.specs, ours, theirs, strict=True):
            if not same_bits(a, b):
                return f"the update of {spec.name} in step {step}, by up to {(a - b).abs().max().item():.3g}"
        if where := same_state(eager.setup.snapshot(), replayed.setup.snapshot()):
            return f"the state in step {step}: {where}"
    return ""


def _timed(arms: dict[str, Callable[[], object]], cuda: bool, rounds: int) -> dict[str, list[float]]:
    """Seconds of one call of each arm in each round."""
    device = "cuda" if cuda else "cpu"
    once = {name: max(seconds_of(run, 2, device), 1e-6) for name, run in arms.items()}
    times = {name: max(1, min(50, int(ROUND / seconds))) if cuda else 1 for name, seconds in once.items()}
    return in_rounds(arms, rounds, lambda name: seconds_of(arms[name], times[name], device))


def kernels(run: Callable[[], object]) -> list[tuple[str, int, float]]:
    """(name, how often, µs together) of the kernels that one call starts, the slowest first."""
    from torch import profiler

    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    count, spent = Counter[str](), Counter[str]()
    for event in _on_device(recorded):
        count[event.name] += 1
        spent[event.name] += event.time_range.elapsed_us()
    return [(name, count[name], us) for name, us in spent.most_common()]


def _on_device(recorded: Any) -> Iterator[Any]:
    return (event for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA)
