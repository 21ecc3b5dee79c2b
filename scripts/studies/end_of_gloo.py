"""Number of processes that gloo aborts at their end, by their last actions: DistributedDataParallel and `ab.attach`.

    python -m scripts.studies.end_of_gloo --pairs 6

In each of two processes gloo's threads run only when no other thread needs the processor, as sometimes happens on a
busy machine: a process then ends while they still hold a tensor. Linux only.
"""

import argparse
import collections
import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which an optimizer imports, for seconds
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accordion_bench as ab
import accordion_bench.attaching.api

WAYS = {
    "DDP": "nothing",
    "DDP, barrier": "dist.barrier()",
    "DDP, destroy": "dist.destroy_process_group(), while the wrapped model is there",
    "DDP, del, destroy": "the same after `del` of the wrapped model",
    "attach": "nothing",
    "attach, detach": "comm.detach()",
    "attach(DDP), detach, destroy": "comm.detach(), `del`, gc.collect(), dist.destroy_process_group()",
}
kept: list[Any] = []


def starve() -> None:
    """Let gloo's threads run on one processor, and only when no other thread does."""
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), {min(os.sched_getaffinity(0))})
        if (task / "comm").read_text(encoding="utf-8").strip() == "pt_gloo_runloop":
            os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


def train(way: str, rank: int, folder: str) -> None:
    """Take a few steps, then end in the given way."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = nn.Linear(3, 3)
    module = DistributedDataParallel(model) if "DDP" in way else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    comm = ab.attach(module, optimizer) if "attach" in way else None
    starve()
    for _ in range(3):
        module(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if comm is None:  # as a loop that shares its loss
        for n in range(5):
            shared = torch.ones(1000 + n)
            dist.all_reduce(shared)
        kept.append(shared)
    if "barrier" in way:
        dist.barrier()
    if comm is not None and "detach" in way:
        comm.detach()
    if "del" in way or "detach, destroy" in way:
        del module, comm
        gc.collect()
    else:
        kept.append(module)
    if "destroy" in way:
        dist.destroy_process_group()


def ended(way: str) -> list[int]:
    """Return the exit statuses of two processes."""
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in (0, 1):
            child = os.fork()
            if child == 0:
                with open(os.devnull, "w", encoding="utf-8") as nowhere:
                    os.dup2(nowhere.fileno(), 2)  # "terminate called without an active exception"
                train(way, rank, folder)
                sys.exit(0)
            children.append(child)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main() -> None:
    """Print a line for each way to end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6, help="of processes for each way")
    parser.add_argument("--only", nargs="*", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    args = parser.parse_args()
    for way in args.only:
        found = collections.Counter(status for _ in range(args.pairs) for status in ended(way))
        print(f"{way:<30}{found[-6]:>3} of {2 * args.pairs} aborted   before the end: {WAYS[way]}", flush=True)
        for other in found.keys() - {0, -6}:
            print(f"    {found[other]} ended with {other}", flush=True)


if __name__ == "__main__":
    main()
