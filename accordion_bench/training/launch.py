"""Launch: workers in this process, in spawned processes, or in the processes of torchrun or Slurm."""

import contextlib
import datetime
import multiprocessing
import multiprocessing.util
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from accordion_bench.comm.collectives import Comm
from accordion_bench.config.components import build
from accordion_bench.processes import rendezvous
from accordion_bench.processes.interrupt import AT_ONCE, Interrupted, Stopper
from accordion_bench.processes.placement import Layout
from accordion_bench.processes.signals import handling
from accordion_bench.processes.watchdog import DIED, ChildRefused, RankFailed, Watch, failure_of, told
from accordion_bench.runs import checkpoint
from accordion_bench.runs.folder import RunFolder, log

Config = dict[str, Any]


@contextlib.contextmanager
def joined(cfg: Config, where: Layout) -> Iterator[Watch | None]:
    """Where torchrun or Slurm has started this process: join its process group; gives the watch over it, else None."""
    if where.launcher == "self":
        yield None
        return
    watch = rendezvous.current()
    with through(cfg["comm"].get("interface")):
        _join(cfg, where, watch.store)
        try:
            yield watch
        finally:
            _leave()


def _join(cfg: Config, where: Layout, store: Any) -> None:
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=cfg["comm"]["timeout"])
    dist.init_process_group(where.backend, store=store, rank=where.rank, world_size=where.processes, timeout=timeout)


@contextlib.contextmanager
def through(interface: str | None) -> Iterator[None]:
    """Let gloo and NCCL use this network interface; None: what they choose, or what the environment says."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(interface)))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def prepare_data(cfg: Config, where: Layout, watch: Watch | None) -> None:
    """Make sure that the data is there, once per machine; all processes wait.

    Raises:
        ConfigError: the data is missing here.
    """
    if where.local_rank == 0:
        build(cfg["dataset"], "dataset").prepare(cfg["paths"]["data"])
    if watch is not None:
        watch.store.set(f"data-{where.rank}", "")
        for rank in range(where.processes):
            watch.get(f"data-{rank}")


def run(cfg: Config, where: Layout, folder: RunFolder, watch: Watch | None = None) -> None:
    """Train in all processes that this one is responsible for; the leader has written the summary when it returns.

    Args:
        cfg: the resolved configuration.
        where: the layout.
        folder: the run folder.
        watch: over the process group that `joined` has joined.

    Raises:
        Interrupted: stopped by a signal, state saved.
        RuntimeError: a process failed.
    """
    if where.launcher == "self" and where.processes > 1:
        _spawn(cfg, where, folder)
    else:
        train(cfg, where, folder, watch)


def train(cfg: Config, where: Layout, folder: RunFolder, watch: Watch | None = None) -> None:
    """Train in this process, as one of possibly several that have joined a process group."""
    from accordion_bench.training.trainer import Trainer

    device = "cpu"
    if where.device == "cuda":
        device = f"cuda:{where.local_rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    stopper = Stopper(leader=where.rank == 0, store=watch.store if watch else None)
    comm = Comm(where.workers_per_process, where.processes, where.rank, device)
    comm.timeout = cfg["comm"]["timeout"]
    handler = folder.log_to_file() if comm.leader else None
    with handling(stopper.note):
        try:
            trainer = Trainer(cfg, comm, folder, stopper)
            if cfg["resume"]:
                resume(trainer, folder)
            summary = trainer.fit()
            if comm.leader:
                folder.finish(summary)
            comm.barrier()
        except BaseException as error:
            first = watch.first(error) if watch else error
            if comm.leader:
                log.error("%s: %s", getattr(first, "kind", type(first).__name__), first)
            if first is error:
                raise
            raise first from None
        finally:
            if handler is not None:
                log.removeHandler(handler)
                handler.close()


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
        with handling(signal.SIG_IGN):  # inherited: a child that does not listen yet leaves Ctrl-C to its parent
            for rank in range(where.processes):
                receive, send = context.Pipe(duplex=False)
                arguments = (rank, cfg, where, str(folder.path), f"{meeting}/store", send)
                child = context.Process(target=_child, args=arguments, name=f"rank {rank}", daemon=True)
                child.start()
                send.close()
                children.append(child)
                ends.append(receive)
        received: list[int] = []
        with handling(_forwarding(children, received)):
            errors = _wait(children, ends, received)
    if folder.done:
        return
    stopped = [error for error in errors if error["kind"] == "Interrupted"]
    if stopped:
        raise Interrupted(stopped[0]["step"], stopped[0]["signum"])
    if received:
        raise Interrupted(None, received[0])
    # a process that was killed could not say so: the others' complaints about it came before we noticed
    first = min(errors, key=lambda error: (error["kind"] != DIED, error["second_hand"], error["time"]))
    raise told(first, rank=0)


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
                died = {"rank": rank, "kind": DIED, "message": text, "traceback": text}
                errors.append(died | {"time": time.time(), "second_hand": False})
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
    timeout = cfg["comm"]["timeout"]
    try:
        store = dist.FileStore(store_file, where.processes)
        watch = Watch(store, rank, where.processes, rank, timeout)  # the parent does the watching
        with through(cfg["comm"].get("interface")):
            _join(cfg, where, store)
            train(cfg, where, RunFolder(Path(folder)), watch)
    except BaseException as error:
        message = failure_of(error, rank, timeout)
        message |= {"time": time.time(), "second_hand": isinstance(error, ChildRefused | RankFailed)}
        message |= {"step": getattr(error, "step", 0)}
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
