"""Start training: workers in this process, in spawned processes, or in processes of torchrun, Slurm or OpenMPI."""

import contextlib
import functools
import math
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from accordion_bench import output
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.elastic import ElasticMembership
from accordion_bench.comm.generations import Terms
from accordion_bench.config.components import Components, build_components
from accordion_bench.config.continuation import computed_with
from accordion_bench.datasets.dataset import Dataset
from accordion_bench.processes import machine, process_group
from accordion_bench.processes.interrupt import Stopper, handling
from accordion_bench.processes.machine import run_settings
from accordion_bench.processes.placement import Placement, with_placement
from accordion_bench.processes.rejoining import Guard
from accordion_bench.processes.replacing import Replaced
from accordion_bench.processes.spawn import spawn
from accordion_bench.processes.watchdog import Watch
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import durable
from accordion_bench.runs.folder import RunFolder, log
from accordion_bench.runs.saving import remove_older
from accordion_bench.training import codec_kernels
from accordion_bench.training.progress import Heartbeat


@contextlib.contextmanager
def join_process_group(config: RunConfig, where: Placement, watch: Watch | None) -> Iterator[None]:
    """Join the process group of processes that a launcher started; do nothing if there is no such launcher.

    Args:
        config: the configuration.
        where: the placement.
        watch: watchdog over those processes; None without a launcher.
    """
    if watch is None:
        if where.processes > 1:
            process_group.settings(config.comm.interface, os.environ)  # refuse a bad interface before processes start
        yield
        return
    with process_group.use_settings(config.comm.interface):
        if config.sync.get("elastic"):  # each generation creates its own process group
            yield
            return
        process_group.join(where, watch.store, config.comm.timeout)
        try:
            yield
        except BaseException:
            process_group.leave(failed=True)
            raise
        process_group.leave()


def prepare_data(dataset: Dataset, folder: str, where: Placement, watch: Watch | None) -> None:
    """Check or download the data once per machine; all processes wait.

    Raises:
        ConfigError: the data is missing on this machine.
    """
    if where.local_rank == 0:
        dataset.prepare(folder)
    if watch is not None:
        watch.wait_for_all("data")


def run(config: RunConfig, where: Placement, folder: RunFolder, parts: Components, watch: Watch | None = None) -> bool:
    """Train in all processes that this one starts or belongs to; the leader has written the summary on return.

    Returns:
        whether this process reports the result: the leader, which in elastic runs may be any process.

    Args:
        config: the configuration.
        where: the placement.
        folder: the run folder.
        parts: components of the run; spawned processes build their own.
        watch: watchdog over the process group that this process has joined; None if it is alone.

    Raises:
        Interrupted: a signal stopped the run and the state was saved.
        RuntimeError: a process failed.
    """
    if where.launcher != "self" or where.processes == 1:
        return train(config, where, folder, watch, parts)
    task = functools.partial(_train_spawned, config, folder.path)
    if parts.sync.elastic:
        ended = Replaced(task, where, config.comm.timeout, config.comm.interface).run()
    else:
        ended = spawn(task, where, config.comm.timeout, config.comm.interface)
    error = ended.error()
    if error is not None and not folder.done:
        raise error
    return True


def _train_spawned(config: RunConfig, folder: Path, where: Placement, watch: Watch) -> None:
    train(config, where, RunFolder(folder), watch)


def train(
    config: RunConfig,
    where: Placement,
    folder: RunFolder,
    watch: Watch | None = None,
    parts: Components | None = None,
) -> bool:
    """Train in this process, which may be one of several in a process group; return whether it is the leader."""
    from accordion_bench.training.trainer import Trainer

    device = "cpu"
    if where.device != "cpu":
        device = str(machine.own_gpu(where.local_rank, machine.gpu_count()))
        machine.take_gpu(torch.device(device))
    elastic = bool(config.sync.get("elastic"))
    guard: contextlib.AbstractContextManager = contextlib.nullcontext()
    stopper = Stopper(watch.store if watch and not elastic else None)
    comm = Comm(where.workers_per_process, where.processes, where.rank, device)
    comm.timeout = config.comm.timeout
    if elastic and watch is not None:
        least = math.ceil((config.sync.get("min_workers") or 1) / where.workers_per_process)
        same = {"run": str(folder.path)}
        terms = Terms(where.processes, least, comm.timeout, same, where.rank, may_found=not watch.joins)
        membership = ElasticMembership(watch.store, comm, terms)
        if where.launcher == "environment":
            guard = Guard(watch.store, membership.register.me)
    with durable.room(folder.path):
        handler = folder.log_to_file() if comm.leader else None
    told = output.report_lost_streams(f"the training in {folder.path}") if comm.leader else contextlib.nullcontext()
    settings = run_settings(where.device, where.threads, config.deterministic)
    with told, guard, handling(stopper.note), settings:
        try:
            warn_of_other_models(comm)
            with Heartbeat(comm.leader and not output.on_a_terminal(), "loading the data and building the model"):
                parts = parts or build_components(with_placement(config, where), where.workers)
                trainer = Trainer(config, comm, folder, stopper, parts)
                if config.resume:
                    resume(trainer, folder)
            if isinstance(comm.membership, ElasticMembership):
                assert watch is not None
                trainer.runner.preload()  # before the others wait for this worker
                comm.membership.enter(trainer.shared_state())
                watch.shares_errors = False  # from now on, the others continue after an error of this process
            summary = trainer.fit()
            if comm.leader:
                folder.finish(summary)
                remove_older(folder.path, 1, summary["steps"])
                warn(folder.changed_meanwhile(summary["epochs"]))
            comm.membership.together(comm.barrier)
            comm.membership.leave()
            if elastic and watch is not None:
                watch.leave_elastic(comm.processes)
            return comm.leader
        except BaseException as error:
            first = watch.first_error(error) if watch and not elastic else error
            if comm.leader:
                log.error("%s: %s", getattr(first, "kind", type(first).__name__), first)
            if first is error:
                raise
            raise first from None
        finally:
            if handler is not None:
                log.removeHandler(handler)
                handler.close()


def warn_of_other_models(comm: Comm) -> None:
    """Warn on the leader if the GPUs of a run are of different models."""
    if comm.device.type == "cuda" and comm.processes > 1:
        sentence = machine.mixed_gpu_warning(comm.gather_objects(machine.gpu_model(comm.device)))
        warn([sentence] if sentence and comm.leader else [])


def warn(sentences: Iterable[str]) -> None:
    """Print warnings and write them to run.log."""
    for sentence in sentences:
        log.warning(sentence)
        print(f"warning: {sentence}", file=sys.stderr, flush=True)


def resume(trainer: Any, folder: RunFolder) -> None:
    """Restore the newest readable checkpoint, or start from the beginning if there is none yet.

    Args:
        trainer: trainer before its first step.
        folder: the run folder.

    Raises:
        ConfigError: checkpoints exist, but none can be read.
    """
    began_with = str(computed_with(folder).get("kernels", ""))
    path, problems = trainer.load_newest()
    if not trainer.comm.leader:
        return
    problems = [f"{problem}; an older one is used" for problem in problems]
    if folder.marked and (wrong := folder.wrong_summary()):
        problems.append(f"{wrong}; the end of the run is computed again")
    folder.remove_summary()  # of the earlier part of the run, which says why it stopped
    problems.append(folder.keep_metrics_before(trainer.position.epoch))
    problems.append(codec_kernels.other_than(began_with, trainer.kernels))
    warn(filter(None, problems))
    where = f"going on after step {trainer.position.step}" if path else "it has no checkpoint, and starts again"
    log.info(where)
    print(f"{folder.path}: {where}", flush=True)
