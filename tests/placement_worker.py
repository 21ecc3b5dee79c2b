"""What each process of the placement test runs: every compressor for a few steps, then saves what it got."""

import torch
import torch.distributed as dist

from accordion_bench.comm import Comm
from tests.helpers import exchange_for, gradients

STEPS = 3


def all_updates(comm: Comm, cases) -> dict:
    """Updates, ledger and residuals of every case, for the rows of this process."""
    out = {}
    for case, (name, options) in enumerate(cases):
        fresh = Comm(comm.local_workers, comm.processes, comm.rank)
        exchange, plan = exchange_for(name, comm=fresh, **options)
        rows = slice(fresh.first_worker, fresh.first_worker + fresh.local_workers)
        updates = []
        for step in range(STEPS):
            xs_W = [x[rows].clone() for x in gradients(workers=comm.workers, step=step).tensors]
            updates.append([u.clone() for u in exchange(xs_W, plan, step, lr=0.1)])
        residuals = {n: e["residual_W"] for n, e in exchange.state.items() if "residual_W" in e}
        out[case] = {"updates": updates, "ledger": fresh.ledger.columns(), "residuals": residuals}
    return out


def run(rank: int, processes: int, per_process: int, folder: str, cases) -> None:
    """One process."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    torch.save(all_updates(Comm(per_process, processes, rank), cases), f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
