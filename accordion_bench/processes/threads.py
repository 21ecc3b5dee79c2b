"""Threads: how many a process computes with, and what they do while they wait.

OpenMP's threads usually spin between two kernels: each burns a core that another process could use, and where they are
more than the free cores, every kernel waits for one that the kernel of the machine has put aside. Ours sleep.
"""

import os
from collections.abc import Callable, Mapping, MutableMapping

from accordion_bench.options import checks

PER_CORE = 16  # that may be asked for; OpenMP ends a process that wants some 10,000
WORTH_SHARING = 100e6  # operations of a step in one kernel from which on a second thread pays: docs/performance.md


def sleep_while_waiting(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let waiting threads sleep, here and in processes that are started from here; what the user has set stays.

    Call it before torch is imported: OpenMP reads it once.
    """
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def choose_threads(
    asked: int | None, processes: int, work: Callable[[], float], environ: Mapping[str, str] = os.environ
) -> int:
    """How many threads each process of a run computes with.

    What was asked for; else what `OMP_NUM_THREADS` says; else an equal share of the cores, or 1 where kernels are too
    small to be shared.

    Args:
        asked: the option `threads`; null = choose.
        processes: of the run on this machine.
        work: tells the floating-point operations of a step in a kernel, on average; asked where they decide.
        environ: of the process.

    Raises:
        ValueRefused: they are more than this machine can start.
    """
    if asked is not None:
        return checked_threads("threads", asked)
    told = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if told.isdecimal():
        return checked_threads("OMP_NUM_THREADS", max(1, int(told)))
    share = max(1, cores() // processes)
    return share if share > 1 and work() >= WORTH_SHARING else 1


def checked_threads(key: str, threads: int) -> int:
    """A number of threads that this machine can start.

    Args:
        key: where it stands, for the sentence.
        threads: asked for.

    Raises:
        ValueRefused: it is none.
    """
    checks.integer(key, threads, at_least=1)
    return checks.integer(key, threads, at_least=1, at_most=PER_CORE * (os.cpu_count() or 1), instead=cores())


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
