"""Arms behind shaped links: every host has one process, in which the arms take their turns.

A bench starts itself in each host, with the same words and `--inside FILE`, into which the first host writes.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from scripts.bench.harness import WARM_UP, in_rounds

Measured = Mapping[str, Any]  # `seconds` of a step, and what else was counted
Measure = Callable[[Callable[[], object], int], Measured]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What such benches are told in the same words."""
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.5, help="of one arm in one round, about")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)


def in_hosts(module: str, hosts: int, rate: str, slow_hosts: Iterable[str] = ()) -> dict[str, Any]:
    """Start a module in every host, with the words of this command line; what the first host has written.

    Args:
        module: such as scripts.bench.netlab.
        hosts: how many.
        rate: of each host's link, as it is typed.
        slow_hosts: as they are typed, such as 2:20mbit.
    """
    from accordion_bench.netlab import options
    from accordion_bench.netlab.hosts import Hosts

    slow = dict(options.slow_host(item, hosts) for item in slow_hosts)
    with tempfile.TemporaryDirectory() as folder, Hosts(hosts, options.rate(rate), slow) as started:
        out = Path(folder, "told.json")
        outcome = started.run([sys.executable, "-m", module, *sys.argv[1:], "--inside", str(out)])
        if not out.exists():
            sys.exit(f"rate {rate}: a host failed ({outcome})")
        return json.loads(out.read_text(encoding="utf-8"))


def inside(args: argparse.Namespace, names: Iterable[str], build: Callable[[str, int, int], Any], measure: Any) -> None:
    """Time all arms in this host's process; the first host writes what was found, and which arms lack a package.

    Args:
        args: with `inside`, `rounds` and `seconds`.
        names: of the arms.
        build: arm, rank and number of processes -> what `measure` takes.
        measure: what `build` made, and a number of steps -> `seconds` of a step, and what else was counted; all
            processes call it together.
    """
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)  # torch 2.15 renames broadcast_buffers, 2.11 has only that
    dist.init_process_group("gloo")
    rank, processes = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
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
    if rank == 0:
        args.inside.write_text(json.dumps({"rounds": found, "failed": failed}), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # the transports' threads and DistributedDataParallel's hooks need not be taken apart


def seconds_of_the_slowest(step: Callable[[], object], count: int) -> dict[str, float]:
    """Seconds of a step on the host that takes longest."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        step()
    took = torch.tensor([(time.perf_counter() - start) / count], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return {"seconds": float(took)}
