"""Check of placement: 1x4, 2x2 and 4x1 (processes x workers per process) give the same run.

Tensor suffixes: W local workers.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.members import communication_error_text
from accordion_bench.conformance.subject import Maker, Setup, demand, gradients, max_relative_difference, same_bits
from accordion_bench.plan import TensorSpec
from accordion_bench.processes.interrupt import end_with_parent
from accordion_bench.sync.scheme import PER_WORKER

WIDTH, LAYERS, WORDS, POSITIONS = 768, 12, 50257, 1024


def resnet50() -> list[TensorSpec]:
    """Return the specs of ResNet-50: 161 tensors, 25.6 million entries."""
    import torchvision

    with torch.device("meta"):
        named = torchvision.models.resnet50().named_parameters()
    return [TensorSpec(name, tuple(p.shape)) for name, p in named]


def gpt2() -> list[TensorSpec]:
    """Return the specs of GPT-2: 148 tensors, 124 million entries."""
    norm = {"weight": (WIDTH,), "bias": (WIDTH,)}
    parts = {"attn.qkv": 3 * WIDTH, "attn.proj": WIDTH, "mlp.up": 4 * WIDTH}
    shapes: dict[str, tuple[int, ...]] = {"wte": (WORDS, WIDTH), "wpe": (POSITIONS, WIDTH)}
    for layer in range(LAYERS):
        for ln in ("ln_1", "ln_2"):
            shapes |= {f"{layer}.{ln}.{key}": shape for key, shape in norm.items()}
        for name, wide in parts.items():
            shapes |= {f"{layer}.{name}.weight": (wide, WIDTH), f"{layer}.{name}.bias": (wide,)}
        shapes |= {f"{layer}.mlp.down.weight": (WIDTH, 4 * WIDTH), f"{layer}.mlp.down.bias": (WIDTH,)}
    shapes |= {f"ln_f.{key}": shape for key, shape in norm.items()}
    return [TensorSpec(name, shape) for name, shape in shapes.items()]


def small(specs: list[TensorSpec]) -> list[TensorSpec]:
    """Return as many specs, with as many distinct shapes, with an eighth of each side; sides below 8 stay."""
    return [TensorSpec(s.name, tuple(side // 8 if side >= 8 else side for side in s.shape)) for s in specs]


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
