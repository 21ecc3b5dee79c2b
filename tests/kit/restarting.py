"""A launcher like one agent of torchrun for each worker: it hosts the store and starts a lost worker again."""

import os
import signal
import time
from typing import Any

import torch.distributed as dist

from tests.kit.processes import _server, _within


def worker(cfg: dict[str, Any]) -> None:
    """Run a configuration in a process of the launcher; the exit status is 1 after an error."""
    from accordion_bench import train

    os.environ.pop("TINY_TROUBLE") if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0" else None
    try:
        train.run(cfg)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(1)


class Agents:
    """One agent per worker, in this process.

    Args:
        cfg: configuration of the run.
        processes: number of workers.
        restarts: how often an agent starts its worker again.
        together: whether the loss of one worker restarts all, as with one agent for all.
    """

    def __init__(self, cfg: dict[str, Any], processes: int, restarts: int = 1, together: bool = False) -> None:
        self.cfg, self.restarts, self.together = cfg, restarts, together
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, multi_tenant=True)
        self.told = {
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "test",
        }
        self.begun = [0] * processes
        self.workers = [self._start(rank) for rank in range(processes)]

    def _start(self, rank: int) -> Any:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(self.begun[rank])}
        process = _server.Process(target=_within, args=({**os.environ, **self.told, **own}, worker, (self.cfg,)))
        process.start()
        self.begun[rank] += 1
        return process

    def run(self, seconds: float = 240) -> list[int]:
        """Return the exit statuses of the last workers; kill those that are still running after some seconds."""
        until = time.monotonic() + seconds
        while any(worker.exitcode != 0 for worker in self.workers) and time.monotonic() < until:
            time.sleep(0.1)
            lost = [rank for rank, one in enumerate(self.workers) if one.exitcode and self.begun[rank] <= self.restarts]
            if lost and self.together:
                lost = [*range(len(self.workers))]
                for one in self.workers:
                    os.kill(one.pid, signal.SIGTERM) if one.exitcode is None else None
                for one in self.workers:
                    one.join(30)
            for rank in lost:
                self.workers[rank] = self._start(rank)
            if not lost and all(worker.exitcode is not None for worker in self.workers):
                break
        for one in self.workers:
            one.kill() if one.exitcode is None else None
            one.join()
        return [one.exitcode for one in self.workers]
