"""Environment of a process, read without importing torch: its launcher, number of threads, and OpenMP's wait policy.

By default OpenMP's threads spin between two kernels and occupy cores that other processes could use. With more threads
than free cores, every kernel then waits for a descheduled thread. `sleep_while_waiting` makes waiting threads sleep.
"""

import os
from collections.abc import Callable, Mapping, MutableMapping

from accordion_bench.options import checks

# rank variables of torchrun, OpenMPI and Slurm, as read by `placement.environment_ranks`
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def launched() -> bool:
    """Whether torchrun, Slurm or OpenMPI started this process."""
    return any(name in os.environ for name in RANKS)


def leads() -> bool:
    """Whether this process has rank 0, or was started without a launcher."""
    told = [os.environ[name] for name in RANKS if name in os.environ]
    return not int(told[0] if told else 0)


PER_CORE = 16  # maximum number of threads per core; OpenMP ends a process that requests about 10,000
WORTH_SHARING = 100e6  # floating-point operations per kernel from which a second thread pays: docs/performance.md


def sleep_while_waiting(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set OMP_WAIT_POLICY for this process and its children, unless the user has set it.

    Call it before torch is imported, because OpenMP reads the variable once.
    """
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def choose_threads(
    asked: int | None, processes: int, work: Callable[[], float], environ: Mapping[str, str] = os.environ
) -> int:
    """Return the number of compute threads per process of a run.

    It is `asked`, otherwise `OMP_NUM_THREADS`, otherwise an equal share of the cores, or 1 if kernels are too small.

    Args:
        asked: the option `threads`; null = choose.
        processes: number of processes of the run on this machine.
        work: returns the mean floating-point operations per kernel of a step; called only if they decide.
        environ: environment of the process.

    Raises:
        ValueRefused: the number exceeds `PER_CORE` per core.
    """
    if asked is not None:
        return checked_threads("threads", asked)
    told = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if told.isdecimal():
        return checked_threads("OMP_NUM_THREADS", max(1, int(told)))
    share = max(1, cores() // processes)
    return share if share > 1 and work() >= WORTH_SHARING else 1


def checked_threads(key: str, threads: int) -> int:
    """Check a number of threads against the limit of this machine.

    Args:
        key: name of the option or variable, for the message.
        threads: number of threads.

    Raises:
        ValueRefused: the number is below 1, or exceeds `PER_CORE` per core.
    """
    checks.integer(key, threads, at_least=1)
    return checks.integer(key, threads, at_least=1, at_most=PER_CORE * (os.cpu_count() or 1), instead=cores())


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
