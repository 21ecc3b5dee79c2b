"""Arms behind shaped links: every host has one process, in which the arms alternate.

A bench starts itself in each host, with the same arguments and `--inside FILE`; the first host writes this file.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from scripts.bench.harness import WARM_UP, in_rounds

FILE = "{file}"  # in a command line: what the first host writes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the common arguments of such benches."""
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one arm in one round, about")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)


def in_hosts(module: str, hosts: int, rate: str, slow_hosts: Iterable[str] = ()) -> dict[str, Any]:
    """Start a bench in every host, with the arguments of this command line; return the result of the first host.

    Args:
        module: module of the bench, such as scripts.bench.netlab.
        hosts: number of hosts.
        rate: rate of each host's link, as an option, such as 100mbit.
        slow_hosts: slow hosts as options, such as 2:20mbit.
    """
    from accordion_bench.netlab import options

    slow = dict(options.slow_host(item, hosts) for item in slow_hosts)
    command = ["-m", module, *sys.argv[1:], "--inside", FILE]
    try:
        return launched(command, hosts, options.rate(rate), slow)
    except RuntimeError as failed:
        sys.exit(str(failed))


def launched(
    words: Sequence[str], hosts: int, rate: float | None, slow: Mapping[int, float] | None = None
) -> dict[str, Any]:
    """Launch a command in every host; return the result of the first host.

    Args:
        words: arguments of Python's command line, with FILE in place of the file's path.
        hosts: number of hosts.
        rate: rate of each host's link in bit/s; None = no limit.
        slow: host -> rate of its link.

    Raises:
        RuntimeError: a host failed.
    """
    from accordion_bench.netlab.hosts import Hosts

    with tempfile.TemporaryDirectory() as folder, Hosts(hosts, rate, dict(slow or {})) as started:
        out = Path(folder, "told.json")
        command = [sys.executable, *(str(out) if word == FILE else word for word in words)]
        outcome = started.run(command, env={"OMP_NUM_THREADS": "1"})
        if outcome.status or not out.exists():
            raise RuntimeError(f"{hosts} hosts at {rate} bit/s: host {outcome.failed} failed")
        return json.loads(out.read_text(encoding="utf-8"))


def meet() -> tuple[int, int]:
    """Join the other hosts over gloo, with one thread; return (rank, number of processes)."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)  # torch 2.15 renames broadcast_buffers, 2.11 has only that
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    return dist.get_rank(), dist.get_world_size()


def leave(out: Path, told: Mapping[str, Any]) -> NoReturn:
    """End this process when all are done; the first host writes its results."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        out.write_text(json.dumps(told), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # the transports' threads and DistributedDataParallel's hooks need not be taken apart


def inside(args: argparse.Namespace, names: Iterable[str], build: Callable[[str, int, int], Any], measure: Any) -> None:
    """Time all arms in this host's process; the first host writes the results, and the arms that lack a package.

    Args:
        args: arguments with `inside`, `rounds` and `seconds`.
        names: names of the arms.
        build: function of arm, rank and number of processes that returns the subject of `measure`.
        measure: function of the result of `build` and a number of steps that returns `seconds` of a step, and other
            counts; all processes call it together.
    """
    rank, processes = meet()
    arms, failed = {}, {}
    for name in names:
        try:
            arms[name] = build(name, rank, processes)
        except ImportError as error:
            failed[name] = str(error)
    for built in arms.values():
        measure(built, WARM_UP)
    counts = {name: max(1, min(10, round(args.seconds / measure(arms[name], 1)["seconds"]))) for name in arms}
    found = in_rounds(arms, args.rounds, lambda name: measure(arms[name], counts[name]))
    leave(args.inside, {"rounds": found, "failed": failed})


def seconds_of_the_slowest(step: Callable[[], object], count: int) -> dict[str, float]:
    """Return the seconds of a step on the slowest host, and the megabytes that the calling host sends in it."""
    import torch
    import torch.distributed as dist

    from accordion_bench.netlab.hosts import INTERFACE
    from accordion_bench.network.meter import Interface

    interface = Interface(INTERFACE)
    dist.barrier()
    start, sent = time.perf_counter(), interface.sent()
    for _ in range(count):
        step()
    took = torch.tensor([(time.perf_counter() - start) / count], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return {"seconds": float(took), "megabytes": (interface.sent() - sent) / count / 1e6}
