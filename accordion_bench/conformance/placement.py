"""Checks of placement: 1x4, 2x2 and 4x1 (processes x workers per process) give the same run; devices equal the CPU.

Tensor suffixes: W local workers.
"""

import contextlib
import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.graphs import CapturedWork, Graphs, NotCapturable, eagerly
from accordion_bench.comm.members import communication_error_text
from accordion_bench.comm.on_device import Streams
from accordion_bench.conformance.pretend_device import (
    DEVICE,
    NO_KERNEL,
    READ_BY_HOST,
    SIZED_BY_DATA,
    Pretend,
    one_launch,
    pretended,
    real,
)
from accordion_bench.conformance.subject import (
    LATE,
    Maker,
    NotApplicable,
    Setup,
    demand,
    draws,
    flat,
    gradients,
    max_relative_difference,
    same_bits,
    same_state,
)
from accordion_bench.exchange.dry_exchange import tensors_in
from accordion_bench.position import StepInfo
from accordion_bench.processes.interrupt import end_with_parent
from accordion_bench.sync.scheme import PER_WORKER
from accordion_bench.tensors.upload import capture_uploads, filled

T = TypeVar("T")
READS = {"numpy", "tolist", "item", "__array__", "__bool__", "__int__", "__float__", "__index__"}
UNDECLARED = {"running_mean", "running_var"}  # written by batch_norm, although its schema does not say so
UNSEEDED = 0x5EED_0F_7A9E  # seed of torch's generator during a capture
FROM_HOST = {torch.tensor, torch.as_tensor, torch.from_numpy}


class Tape(TorchDispatchMode):
    """Records operations while they are computed; `undo` reverts their writes, `replay` computes them again."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, dict[str, Any], Any]] = []
        self._before: list[tuple[Tensor, Tensor]] = []  # written tensors and copies of their previous values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in READ_BY_HOST | SIZED_BY_DATA:
            raise NotCapturable(f"the host reads a number of the device ({name})")
        if kwargs.get("generator") is not None:
            raise NotCapturable(f"{name} draws from a generator of the host")
        self._keep(func, args, kwargs)
        out = func(*args, **kwargs)
        views = any(
            returned.alias_info is not None and not returned.alias_info.is_write for returned in func._schema.returns
        )
        if not (views or name in NO_KERNEL or name == "lift_fresh" or name.startswith("profiler")):
            self.operations.append((func, *tree_map(_as_it_lies, (args, kwargs)), out))
        return out

    def _keep(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        declared = func._schema.arguments
        given = [
            *zip(declared, args, strict=False),
            *((own, kwargs[own.name]) for own in declared if own.name in kwargs),
        ]
        for argument, value in given:
            declares = argument.alias_info is not None and argument.alias_info.is_write
            if declares or argument.name in UNDECLARED:
                written = list(tensors_in(value))
                self._before += [(x, real(x).detach().clone()) for x in written]

    @torch.no_grad()
    def undo(self) -> None:
        """Restore all tensors that were written."""
        for x, before in reversed(self._before):
            real(x).detach().copy_(before)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        """Compute all operations again, in order and on the same memory."""
        for func, args, kwargs, out in self.operations:
            pairs = zip(tensors_in(out), tensors_in(func(*args, **kwargs)), strict=True)
            for there, now in pairs:
                if there is not now and there.numel() and there.data_ptr() != now.data_ptr():
                    real(there).detach().copy_(real(now).detach())


class Strict(TorchFunctionMode):
    """Mode that refuses operations a tape cannot record: host reads, and tensors made from host data."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FROM_HOST:
            raise NotCapturable(f"the host makes a tensor from its own numbers ({func.__name__})")
        if getattr(func, "__name__", "") in READS:
            raise NotCapturable(f"the host reads a number of the device ({func.__name__})")
        return func(*args, **(kwargs or {}))


class TapeGraphs(Graphs):
    """Graphs that are captured on a tape.

    Attributes:
        captured, replayed: number of captures and replays, by name of the pool.
    """

    captures = True

    def __init__(self, streams: Streams | None = None) -> None:
        super().__init__(streams)
        self.captured: dict[str, int] = {}
        self.replayed: dict[str, int] = {}

    def new_generator(self) -> torch.Generator:
        return torch.Generator()

    @contextlib.contextmanager
    def drawing_from(self, generator: torch.Generator) -> Iterator[None]:
        outside = torch.get_rng_state()
        torch.set_rng_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(torch.get_rng_state())
            torch.set_rng_state(outside)

    def capture(self, run: Callable[[], T], pool: str) -> tuple[Callable[..., None], T]:
        tape, state = Tape(), torch.get_rng_state()
        torch.default_generator.manual_seed(UNSEEDED)
        try:
            with capture_uploads(_place) as cells, Strict(), tape:
                out = run()
            if torch.default_generator.initial_seed() != UNSEEDED:
                raise NotCapturable("it seeds a generator")
        finally:
            torch.set_rng_state(state)
            tape.undo()
        self.captured[pool] = self.captured.get(pool, 0) + 1

        def replay() -> None:
            self.replayed[pool] = self.replayed.get(pool, 0) + 1
            with one_launch("graph"):
                tape.replay()

        return functools.partial(filled, cells, replay), out


def _place(x: Tensor, to: torch.device) -> Tensor:
    """Return memory for a host tensor, with its values at capture, because a tape computes while it records."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return Pretend(x.clone()) if to == DEVICE else x.to(to)


def _as_it_lies(x: Any) -> Any:
    """Detach a parameter, which fixes its current memory: a graph does not follow later assignments to `.data`."""
    return x.detach() if isinstance(x, torch.nn.Parameter) else x


STEPS = 3
WORKERS = 4
PROCESSES = (2, 4)
PATIENCE, LAST_WORDS = 300.0, 10.0  # timeouts in seconds: of all processes, and of the others after one has failed

Case = tuple[Maker, float | None]
Result = dict[str, Any]
"""`updates` of every step, `ledger`, state with one row per worker (`rows`) and replicated (`shared`), `sum_eps`."""


def check_placement(make: Maker, level: float | None = None) -> str:
    """1x4 = 2x2 = 4x1: equal bytes, updates and state equal up to rounding; all processes are bitwise equal."""
    with tempfile.TemporaryDirectory() as folder:
        worst = compare(results([(make, level)], Path(folder)), 0)
    return f"off by {worst:.1e}"


def compare(by_placement: dict[str, list[list[Result]]], case: int) -> float:
    """Return the largest difference of updates between 1x4 and other placements; AssertionError above rounding."""
    alone, worst = by_placement["1x4"][0][case], 0.0
    for placement in ("2x2", "4x1"):
        ranks = [rank[case] for rank in by_placement[placement]]
        for number, rank in enumerate(ranks):
            said = f"{placement}: rank {number}"
            demand(rank["ledger"] == alone["ledger"], f"{said} has the ledger {rank['ledger']}, not {alone['ledger']}")
            for step, (ours, first) in enumerate(zip(rank["updates"], ranks[0]["updates"], strict=True)):
                where = f"the update of step {step}"
                demand(all(map(same_bits, ours, first)), f"{said} and rank 0 disagree on {where}")
                worst = max(worst, _close(ours, alone["updates"][step], alone, step, f"{said}: {where}"))
            for key, value in rank["shared"].items():
                demand(same_bits(value, ranks[0]["shared"][key]), f"{said} and rank 0 disagree on {key}")
        for key, value_W in alone["rows"].items():
            joined_W = torch.cat([rank["rows"][key] for rank in ranks])
            _close([joined_W], [value_W], alone, STEPS, f"{placement}: {key}")
    return worst


def _close(ours: list[Tensor], theirs: list[Tensor], alone: Result, step: int, what: str) -> float:
    shapes = [tuple(a.shape) for a in ours], [tuple(b.shape) for b in theirs]
    demand(shapes[0] == shapes[1], f"{what} has the shapes {shapes[0]} instead of {shapes[1]}")
    off = max_relative_difference(ours, theirs)
    # workers' shares are added in another order; each step adds the rounding that the residuals carry over
    rounding = 2 * WORKERS * (step + 1) * alone["sum_eps"] + 1e-11
    demand(off <= rounding, f"{what} is off by {off:.2g} (allowed {rounding:.2g})")
    return off


def results(cases: Sequence[Case], folder: Path) -> dict[str, list[list[Result]]]:
    """Run all cases in every placement, with four processes started once; return results by placement and rank."""
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=run_process, args=(rank, str(folder), cases)) for rank in range(WORKERS)]
    for child in children:
        child.start()
    try:
        out = {f"1x{WORKERS}": [all_results(Comm(WORKERS), cases)]}
        ended = _ended(children)
    finally:
        for child in children:
            child.kill()
    demand(ended == [0] * WORKERS, f"the processes end with {ended}{_last_words(folder)}")
    for processes in PROCESSES:
        files = [folder / f"{processes}-{rank}.pt" for rank in range(processes)]
        out[f"{processes}x{WORKERS // processes}"] = [torch.load(file, weights_only=True) for file in files]
    return out


def _ended(children: Sequence[SpawnProcess]) -> list[int | None]:
    """Return the exit statuses; None after the timeout, which is shorter once another process has failed."""
    deadline, alive = time.monotonic() + PATIENCE, list(children)
    while alive and (left := deadline - time.monotonic()) > 0:
        connection.wait([child.sentinel for child in alive], left)
        alive = [child for child in alive if child.exitcode is None]
        if any(child.exitcode for child in children):
            deadline = min(deadline, time.monotonic() + LAST_WORDS)
    return [child.exitcode for child in children]


def _last_words(folder: Path) -> str:
    """Return the processes' errors, `: rank 0 has lost another one; rank 1 stops with ValueError: boom`, or ""."""
    said = [file.read_text(encoding="utf-8") for rank in range(WORKERS) if (file := folder / f"{rank}.error").exists()]
    return f": {'; '.join(said)}" if said else ""


def all_results(comm: Comm, cases: Sequence[Case]) -> list[Result]:
    """Run every case for some steps, with the gradients of this process's workers."""
    return [_result(Comm(comm.local_workers, comm.processes, comm.rank), make, level) for make, level in cases]


def _result(comm: Comm, make: Maker, level: float | None) -> Result:
    setup, updates = Setup(make(), level, comm=comm), []
    rows = slice(comm.first_worker, comm.first_worker + comm.local_workers)
    for step in range(STEPS):
        xs_W = [x[rows].clone() for x in gradients(workers=comm.workers, step=step)]
        updates.append([u.clone() for u in setup(xs_W, step, lr=0.5)])
    state = {f"{name}.{key}": value for name, entries in setup.snapshot().items() for key, value in entries.items()}
    return {
        "updates": updates,
        "ledger": comm.ledger.columns(),
        "rows": {key: value for key, value in state.items() if key.endswith(PER_WORKER)},
        "shared": {key: value for key, value in state.items() if not key.endswith(PER_WORKER)},
        "sum_eps": setup.compressor.description.claims.sum_eps,
    }


def run_process(rank: int, folder: str, cases: Sequence[Case]) -> None:
    """Run one process: in the group of two if its rank is below 2, then in the group of four.

    After an error the process writes a sentence to a file in the folder and exits with status 1.
    """
    end_with_parent()
    torch.set_num_threads(1)
    try:
        _run_both(rank, folder, cases)
    except Exception as error:
        why = f"stops with {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        if communication_error_text(error):
            why = "has lost another one"
        Path(folder, f"{rank}.error").write_text(f"rank {rank} {why}", "utf-8")
        os._exit(1)  # at interpreter shutdown, a process group with a failed member aborts


def _run_both(rank: int, folder: str, cases: Sequence[Case]) -> None:
    for processes in PROCESSES:
        if rank < processes:
            store = dist.FileStore(f"{folder}/store-{processes}", processes)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
            found = all_results(Comm(WORKERS // processes, processes, rank), cases)
            torch.save(found, f"{folder}/{processes}-{rank}.pt")
            dist.barrier()
            dist.destroy_process_group()


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
