"""Launch: workers in this process, in spawned processes, or in the processes of torchrun or Slurm."""

import contextlib
import datetime
import itertools
import multiprocessing
import multiprocessing.util
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from accordion_bench import checkpoint
from accordion_bench.check import ConfigError
from accordion_bench.comm import Comm
from accordion_bench.config import build
from accordion_bench.interrupt import AT_ONCE, Interrupted, Stopper
from accordion_bench.layout import Layout
from accordion_bench.record import RunFolder, log

Config = dict[str, Any]
_runs = itertools.count()
REFUSALS = ("NonFinite", "ConfigError", "ValueRefused", "ChildRefused")


@contextlib.contextmanager
def joined(cfg: Config, where: Layout) -> Iterator[Any]:
    """Where torchrun or Slurm has started this process: join its process group; gives the group's store, else None."""
    if where.launcher == "self":
        yield None
        return
    import torch.distributed as dist

    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise ConfigError(
            "comm=gloo or nccl under Slurm needs the variables MASTER_ADDR and MASTER_PORT, got not both; type "
            "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1) MASTER_PORT=29500"
        )
    timeout = datetime.timedelta(seconds=cfg["comm"]["timeout"])
    launchers, _, _ = next(dist.rendezvous("env://", where.rank, where.processes, timeout=timeout))
    store = dist.PrefixStore(f"run-{next(_runs)}", launchers)  # it outlives the runs of a sweep
    dist.init_process_group(where.backend, store=store, rank=where.rank, world_size=where.processes, timeout=timeout)
    try:
        yield store
    finally:
        _leave()


def prepare_data(cfg: Config, where: Layout, store: Any) -> None:
    """Make sure that the data is there, once per machine; all processes wait, and refuse together.

    Raises:
        ConfigError: the data is missing on some machine.
    """
    verdict = ""
    if where.local_rank == 0:
        try:
            build(cfg["dataset"], "dataset").prepare(cfg["paths"]["data"])
        except ConfigError as error:
            verdict = str(error)
    verdicts = [verdict]
    if store is not None:
        store.set(f"data-{where.rank}", verdict)
        verdicts = [store.get(f"data-{rank}").decode() for rank in range(where.processes)]
    for verdict in filter(None, verdicts):
        raise ConfigError(verdict)


def run(cfg: Config, where: Layout, folder: RunFolder, store: Any = None) -> None:
    """Train in all processes that this one is responsible for; the leader has written the summary when it returns.

    Args:
        cfg: the resolved configuration.
        where: the layout.
        folder: the run folder.
        store: of the process group that `joined` has joined.

    Raises:
        Interrupted: stopped by a signal, state saved.
        RuntimeError: a process failed.
    """
    if where.launcher == "self" and where.processes > 1:
        _spawn(cfg, where, folder)
    else:
        train(cfg, where, folder, store)


def train(cfg: Config, where: Layout, folder: RunFolder, store: Any = None) -> None:
    """Train in this process, as one of possibly several that have joined a process group."""
    from accordion_bench.trainer import NonFinite, Trainer

    device = "cpu"
    if where.device == "cuda":
        device = f"cuda:{where.local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    stopper = Stopper(leader=where.rank == 0, store=store)
    comm = Comm(where.workers_per_process, where.processes, where.rank, device)
    comm.timeout = cfg["comm"]["timeout"]
    handler = folder.log_to_file() if comm.leader else None
    with stopper.installed():
        try:
            trainer = Trainer(cfg, comm, folder, stopper)
            if cfg["resume"]:
                resume(trainer, folder)
            summary = trainer.fit()
            if comm.leader:
                folder.finish(summary)
            comm.barrier()
        except BaseException as error:
            refused = _first_refusal(error, store)
            if comm.leader:
                log.error("%s: %s", type(error).__name__, refused or error)
            if refused and not isinstance(error, ConfigError | NonFinite):
                raise ChildRefused(refused) from None
            raise
        finally:
            if handler is not None:
                log.removeHandler(handler)
                handler.close()


def _first_refusal(error: BaseException, store: Any) -> str | None:
    """The sentence with which this process, or another one of the group, has stopped; others only see a lost peer."""
    if store is None or isinstance(error, KeyboardInterrupt):
        return None
    with contextlib.suppress(RuntimeError):  # the store may be gone as well
        if type(error).__name__ in REFUSALS:
            store.set("refusal", str(error))
        if store.check(["refusal"]):
            return store.get("refusal").decode()
    return None


def resume(trainer: Any, folder: RunFolder) -> None:
    """Continue from the newest checkpoint, or from the start where there is none yet."""
    path = checkpoint.latest(folder.path)
    if path is not None:
        checkpoint.load(path, trainer)
    if trainer.comm.leader:
        folder.keep_metrics_before(trainer.epoch)
        log.info("resumed at step %d", trainer.step)


def _leave() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


# ---- spawned processes


def _spawn(cfg: Config, where: Layout, folder: RunFolder) -> None:
    """Start one process per rank and wait; on failure end the others and raise the first error."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="accordion_bench-") as meeting:
        ends = []
        children = []
        with _signals(signal.SIG_IGN):  # inherited: a child that does not listen yet leaves Ctrl-C to its parent
            for rank in range(where.processes):
                receive, send = context.Pipe(duplex=False)
                arguments = (rank, cfg, where, str(folder.path), f"{meeting}/store", send)
                child = context.Process(target=_child, args=arguments, name=f"rank {rank}", daemon=True)
                child.start()
                send.close()
                children.append(child)
                ends.append(receive)
        received: list[int] = []
        with _signals(_forwarding(children, received)):
            errors = _wait(children, ends, received)
    if folder.done:
        return
    stopped = [error for error in errors if error["kind"] == "Interrupted"]
    if stopped:
        raise Interrupted(stopped[0]["step"], stopped[0]["signum"])
    if received:
        raise Interrupted(None, received[0])
    # a process that was killed could not say so: the others' complaints about it came before we noticed
    first = min(errors, key=lambda error: (error["kind"] != "died", error["time"]))
    if first["kind"] in REFUSALS:
        raise ChildRefused(first["message"], first["kind"])
    raise RuntimeError(f"rank {first['rank']} failed:\n{first['traceback']}")


class ChildRefused(RuntimeError):
    """Another process stopped with one sentence for the user.

    Args:
        sentence: the one.
        kind: name of the error there.
    """

    def __init__(self, sentence: str, kind: str = "NonFinite") -> None:
        super().__init__(sentence)
        self.kind = kind


def _wait(children: list, ends: list[connection.Connection], received: list[int]) -> list[dict[str, Any]]:
    """Wait for all children; after the first failure give the others a moment to report, then end them."""
    errors: list[dict[str, Any]] = []
    last_signal = time.monotonic()
    deadline = float("inf")
    ended = False  # by us
    open_ends = list(ends)
    alive = True
    while alive or open_ends:
        alive = any(child.is_alive() for child in children)  # one last round after the last one has ended
        ready = connection.wait(open_ends, timeout=0.2) if open_ends else []
        for end in [end for end in open_ends if end in ready]:
            try:
                errors.append(end.recv())
            except EOFError:
                open_ends.remove(end)
        for rank, child in enumerate(children):
            silent = ends[rank] not in open_ends and not any(error["rank"] == rank for error in errors)
            if child.exitcode and silent and not ended:
                text = f"it ended with exit status {child.exitcode} and without a word"
                text += " (killed; out of memory?)" if child.exitcode == -signal.SIGKILL else ""
                errors.append({"rank": rank, "time": time.time(), "kind": "died", "message": text, "traceback": text})
        if errors and deadline == float("inf"):
            grace = 60.0 if errors[0]["kind"] == "Interrupted" else 2.0
            deadline = time.monotonic() + grace
        if time.monotonic() > deadline:
            ended = True
            for child in children:
                child.kill()
        if received and time.monotonic() > last_signal + 1:  # a child that was still starting has not heard it
            last_signal = time.monotonic()
            _signal(children, received[0])
        if not open_ends:
            for child in children:
                child.join(timeout=0.2)
    return errors


def _forwarding(children: list, received: list[int]) -> Callable[[int, Any], None]:
    """Passes a signal on to the children, which finish a step and save; a second one ends them at once."""
    first = 0.0

    def forward(signum: int, frame: Any) -> None:
        nonlocal first
        if not received:
            first = time.monotonic()
        elif time.monotonic() > first + AT_ONCE:
            signum = signal.SIGKILL
        received.append(signum)
        _signal(children, signum)

    return forward


@contextlib.contextmanager
def _signals(handler: Any) -> Iterator[None]:
    """Handle SIGINT and SIGTERM by `handler`."""
    before = {signum: signal.signal(signum, handler) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _signal(children: list, signum: int) -> None:
    for child in children:
        if child.is_alive() and child.pid:
            os.kill(child.pid, signum)


def _child(rank: int, cfg: Config, where: Layout, folder: str, store_file: str, report: Any) -> None:
    """What a spawned process runs."""
    import torch.distributed as dist

    _die_with_parent()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores() // where.processes))
    where = replace(where, rank=rank, local_rank=rank)
    try:
        store = dist.FileStore(store_file, where.processes)
        timeout = datetime.timedelta(seconds=cfg["comm"]["timeout"])
        dist.init_process_group(where.backend, store=store, rank=rank, world_size=where.processes, timeout=timeout)
        train(cfg, where, RunFolder(Path(folder)), store)
    except BaseException as error:
        message = {"rank": rank, "time": time.time(), "kind": type(error).__name__, "message": str(error)}
        message |= {"traceback": traceback.format_exc(), "step": getattr(error, "step", 0)}
        report.send(message | {"signum": getattr(error, "signum", 0)})
        report.close()
        # as at a polite exit: end the readers of data, return their semaphores
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]
        os._exit(1)  # a process group with a failed member cannot be left politely
    _leave()


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _die_with_parent() -> None:
    """End this process when its parent is gone, whatever ended the parent."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
