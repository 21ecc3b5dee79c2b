"""A run with a quorum in several processes, some of which are late, and the record of each process."""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.sealed_store import SealedStore
from accordion_bench.processes.interrupt import Stopper
from accordion_bench.run_config import RunConfig
from accordion_bench.runs.folder import RunFolder
from accordion_bench.training.trainer import Trainer
from tests.kit import local


def connected(rank: int, processes: int, address: str, port: int) -> SealedStore:
    """Join the process group, and return the store of the run."""
    store = SealedStore(dist.TCPStore(address, port, processes, is_master=rank == 0), processes)
    dist.init_process_group("gloo", store=store.of_torch(), rank=rank, world_size=processes)
    return store


def trained(
    rank: int,
    cfg: dict,
    folder: Path,
    store: SealedStore,
    naps: Mapping[tuple[int, int], float],
    pace: float = 0.0,
    stop: int | None = None,
) -> dict[str, Any]:
    """Train in one of several processes with one worker each.

    Args:
        rank: rank of this process.
        cfg: configuration of the run.
        folder: folder of the run; if it contains a checkpoint, the run continues from it.
        store: store of all processes.
        naps: seconds that a process sleeps before a step, by rank and step.
        pace: seconds that all processes sleep before every step.
        stop: number of steps after which all processes stop; None = at the end.

    Returns:
        `who`: participants by number of the averaging, each as rank, current and samples; `steps`: steps of this
        process at each averaging; `replica`: parameters before the end, `shared`: after it; `learnt`: bytes that a late
        process lacks.
    """
    torch.set_num_threads(1)
    processes = dist.get_world_size()
    comm = Comm(1, processes, rank)
    comm.timeout = 60.0
    here = {**cfg["comm"], "processes": processes, "workers_per_process": 1}
    config = RunConfig.from_dict({**cfg, "workers": processes, "comm": here})
    run = Trainer(config, comm, RunFolder(folder), Stopper(store))
    arrivals, who, steps, replicas = run.sync.attendance.arrivals, {}, {}, []
    come, train_step = arrivals.come, run.train_step

    def noted(*arguments: Any) -> list:
        found = come(*arguments)
        who[arrivals.number - 1] = [arrival[:3] for arrival in found]
        steps[arrivals.number - 1] = run.position.step + 1
        return found

    def later() -> None:
        if run.position.step == stop:
            raise KeyboardInterrupt
        time.sleep(pace + naps.get((rank, run.position.step), 0.0))
        train_step()
        replicas[:] = local.replicas(run)[0]

    arrivals.come, run.train_step = noted, later  # type: ignore[method-assign]
    run.load_newest()
    with contextlib.suppress(KeyboardInterrupt):
        run.fit()
    return {
        "who": who,
        "steps": steps,
        "replica": replicas,
        "shared": [x.clone() for x in run.axis.shared],
        "counts": run.comm.ledger.counts,
        "took_part": run.sync.attendance.took_part,
        "averagings": run.sync.attendance.averagings,
        "learnt": sum(x.numel() * x.element_size() for x in run.sync.attendance._to_be_learnt()),
        "rows": run.folder.read_metrics() if rank == 0 else [],
    }
