"""Placement: number of processes and workers per process, backend and device, from configuration and environment."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from accordion_bench.exchange.ddp import refuse_hook
from accordion_bench.network.meter import Interface
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.processes import environment, machine
from accordion_bench.run_config import RunConfig

DEFAULT_WORKERS = 4
# local-rank variables of launchers, the innermost launcher first
RANKS = (  # number of processes, rank
    ("WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),  # the former is set by srun, not by sbatch
)
LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
PER_CORE = 16  # maximum number of training processes per core; more of them only wait for each other


@dataclass(frozen=True)
class Placement:
    """Distribution of the workers of a run over processes.

    Args:
        backend: `simulated`, `gloo` or `nccl`.
        processes: number of processes.
        workers_per_process: W.
        rank: rank of this process if an external launcher started it.
        local_rank: rank of this process on its machine.
        launcher: `self` or `environment` (torchrun, Slurm, OpenMPI).
        device: `cpu` or `cuda`.
        threads: number of threads per process; None = unchanged.
    """

    backend: str
    processes: int
    workers_per_process: int
    rank: int = 0
    local_rank: int = 0
    launcher: str = "self"
    device: str = "cpu"
    threads: int | None = None

    @property
    def workers(self) -> int:
        return self.processes * self.workers_per_process


def environment_ranks(environ: Mapping[str, str]) -> tuple[int, int, int] | None:
    """Return (processes, rank, local rank) as set by torchrun, Slurm or OpenMPI, or None; the default local rank is 0.

    Raises:
        ConfigError: a variable is no number, or the rank is not below the number of processes.
    """
    local = local_rank(environ) or 0
    for size, name in RANKS:
        if name not in environ or size not in environ:
            continue
        processes, rank = number_in(environ, size), number_in(environ, name)
        if processes == 1 and name != "RANK":  # a job's only task may start several processes itself
            continue
        if rank >= processes:
            rule = f"{name} must be below {size}={processes}, as launchers set it, got {rank}"
            raise ConfigError(f"{rule}; type export {name}={max(0, processes - 1)}")
        return processes, rank, local
    return None


def number_in(environ: Mapping[str, str], name: str, missing: int = 1) -> int:
    """Return the number in a variable that a launcher sets; `missing` if it is not set.

    Raises:
        ConfigError: the variable is no number.
    """
    value = environ.get(name, str(missing))
    if not value.isdecimal():
        raise ConfigError(f"{name} must be a whole number, as launchers set it, got {value!r}; type unset {name}")
    return int(value)


def local_rank(environ: Mapping[str, str]) -> int | None:
    """Return the local rank set by the innermost launcher; None if none sets it.

    The order matters: mpirun starts its daemons by srun, and their processes inherit SLURM_LOCALID.
    """
    told = [name for name in LOCAL_RANKS if name in environ]
    return number_in(environ, told[0]) if told else None


def processes_here(environ: Mapping[str, str]) -> int:
    """Return the number of processes that the launcher started on this machine; 1 if unknown."""
    by_slurm = "SLURM_PROCID" in environ and "RANK" not in environ
    if "LOCAL_WORLD_SIZE" in environ and not by_slurm:
        return number_in(environ, "LOCAL_WORLD_SIZE")
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environ:
        return number_in(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    by_hand = "RANK" in environ and "WORLD_SIZE" in environ  # set for srun's tasks by the user's script
    if not by_slurm and not (by_hand and environ.get("SLURM_STEP_NUM_TASKS") == environ["WORLD_SIZE"]):
        return 1
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_NTASKS_PER_NODE", "1"))
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node):  # 4(x2),3
        counts += [int(count)] * int(times or 1)
    node = number_in(environ, "SLURM_NODEID", 0)
    return counts[min(node, len(counts) - 1)]


def all_here(environ: Mapping[str, str]) -> bool:
    """Whether all processes of the run are on this machine, according to the launcher's variables."""
    ranks = environment_ranks(environ)
    return ranks is None or processes_here(environ) >= ranks[0]


@dataclass(frozen=True)
class Started:
    """Processes started by a launcher.

    Args:
        ranks: (processes, rank, local rank) of this process; None = no launcher.
        local: whether the launcher set the local rank.
        here: number of processes on this machine.
    """

    ranks: tuple[int, int, int] | None
    local: bool
    here: int


def place(config: RunConfig, environ: Mapping[str, str] = os.environ, gpus: int | None = None) -> Placement:
    """Choose the placement from the configuration, the environment and the number of GPUs.

    Args:
        config: the configuration.
        environ: environment of this process, with the launcher's variables.
        gpus: number of visible GPUs; None = ask torch.

    Raises:
        ConfigError: the counts are inconsistent, or the machine does not support them.
    """
    gpus = machine.gpu_count() if gpus is None else gpus
    _refuse_values(config, gpus)
    started = Started(environment_ranks(environ), local_rank(environ) is not None, processes_here(environ))
    backend = choose_backend(config, started, gpus)
    processes, per_process = resolve_counts(config, backend, started, gpus)
    _refuse_crowds(backend, processes, per_process, started, gpus)
    ranks = started.ranks or (processes, 0, 0)
    return Placement(
        backend=backend,
        processes=processes,
        workers_per_process=per_process,
        rank=ranks[1],
        local_rank=ranks[2],
        launcher="environment" if started.ranks else "self",
        device="cuda" if gpus and config.device != "cpu" else "cpu",
    )


def _refuse_values(config: RunConfig, gpus: int) -> None:
    """Refuse values that are invalid independently of the placement."""
    comm = config.comm
    config.check_options()
    if comm.interface is not None:
        Interface(comm.interface)
    refuse_hook(comm.hook, comm.hook_state, comm.hook_options)
    if config.device == "cuda" and not gpus:
        raise ValueRefused("device", "auto or cpu on a machine without a CUDA device", "cuda", "auto")
    if config.threads is not None:
        environment.checked_threads("threads", config.threads)


def choose_backend(config: RunConfig, started: Started, gpus: int) -> str:
    """Return the configured backend, or for `auto` the one that suits the processes and GPUs.

    Raises:
        ConfigError: NCCL with device=cpu, or several visible GPUs without a local rank.
    """
    backend, workers, comm = config.comm.backend, config.workers, config.comm
    if backend == "auto":  # never gloo on GPUs, since it copies tensors to host memory
        per_process = comm.workers_per_process
        asked = comm.processes or (workers // per_process if workers and per_process else 1)
        several = started.ranks is not None or asked > 1
        use_nccl = gpus >= (1 if several else 2) and config.device != "cpu"
        backend = "nccl" if use_nccl else "gloo" if several else "simulated"
    if backend == "nccl" and config.device == "cpu":
        raise ValueRefused("comm", "gloo or simulated with device=cpu", "nccl", "gloo")
    if started.ranks is not None and gpus > 1 and config.device != "cpu" and not started.local:
        raise ConfigError(
            f"LOCAL_RANK must be set where a process sees several GPUs, got RANK={started.ranks[1]} without it, "
            f"{gpus} GPUs, and neither SLURM_LOCALID nor OMPI_COMM_WORLD_LOCAL_RANK; type export LOCAL_RANK=NUMBER on "
            "its machine"
        )
    return backend


def resolve_counts(config: RunConfig, backend: str, started: Started, gpus: int) -> tuple[int, int]:
    """Return (processes, workers per process) from the configuration, the launcher and defaults.

    Raises:
        ConfigError: the counts are inconsistent.
    """
    workers, processes, per_process = config.workers, config.comm.processes, config.comm.workers_per_process
    if started.ranks is not None:
        count = started.ranks[0]
        why = f"{count}, the number of processes that the launcher has started"
        processes = _fits("comm.processes", processes, count, why)
        if backend == "simulated":
            rule = f"gloo, nccl or auto in one of {count} processes of torchrun, Slurm or OpenMPI"
            raise ValueRefused("comm", rule, "simulated", "auto")
    if config.comm.engine == "ddp" and backend != "simulated":
        per_process = per_process or 1  # DistributedDataParallel has one worker per process
    if backend == "simulated":
        processes = _fits("comm.processes", processes, 1, "1 with comm=simulated")
    if processes is None:
        processes = _processes(workers, per_process, backend, gpus)
    if per_process is None:
        workers = workers or (DEFAULT_WORKERS if DEFAULT_WORKERS % processes == 0 else processes)
        if workers % processes:
            raise ValueRefused("workers", f"a multiple of comm.processes={processes}", workers, processes)
        per_process = workers // processes
    if workers is not None and workers != processes * per_process:
        rule = f"comm.processes x comm.workers_per_process = {processes} x {per_process}"
        raise ValueRefused("workers", rule, workers, processes * per_process)
    return processes, per_process


def _processes(workers: int | None, per_process: int | None, backend: str, gpus: int) -> int:
    if per_process is not None and workers is not None:
        if workers % per_process:
            raise ValueRefused("workers", f"a multiple of comm.workers_per_process={per_process}", workers, per_process)
        return workers // per_process
    if backend == "nccl":
        return _largest_divisor(workers, gpus) if workers else max(gpus, 1)
    if per_process is not None and DEFAULT_WORKERS % per_process == 0:
        return DEFAULT_WORKERS // per_process
    return workers or DEFAULT_WORKERS


def _refuse_crowds(backend: str, processes: int, per_process: int, started: Started, gpus: int) -> None:
    """Refuse more processes than the machine has GPUs, or more than `PER_CORE` per core."""
    here = processes if started.ranks is None else started.here
    if backend == "nccl" and not gpus:
        raise ValueRefused("comm", "gloo or simulated on a machine without a CUDA device", "nccl", "auto")
    own = started.ranks is not None and gpus == 1  # may be a different GPU per process: `machine.refuse_shared_gpu`
    if backend == "nccl" and here > gpus and not own:
        how = "comm.workers_per_process adds workers, comm=gloo lets processes share a GPU"
        rule = f"at most {gpus}, the GPUs here, one for each process ({how})"
        raise ValueRefused("comm.processes", rule, here, gpus)
    cores = os.cpu_count() or 1
    most = PER_CORE * cores
    if backend != "nccl" and here > most:
        rule = f"at most {most} on this machine, {PER_CORE} for each core (comm.workers_per_process adds workers)"
        raise ValueRefused("comm.processes", rule, here, _largest_divisor(processes * per_process, min(most, cores)))


def with_placement(config: RunConfig, where: Placement) -> RunConfig:
    """Return the configuration with the numbers of workers and processes of a placement."""
    comm = replace(config.comm, processes=where.processes, workers_per_process=where.workers_per_process)
    return replace(config, workers=where.workers, comm=comm)


def _fits(key: str, given: int | None, actual: int, rule: str) -> int:
    if given is not None and given != actual:
        raise ValueRefused(key, rule, given, actual)
    return actual


def _largest_divisor(workers: int, limit: int) -> int:
    return max(n for n in range(1, max(limit, 1) + 1) if workers % n == 0)
