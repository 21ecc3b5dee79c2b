"""As many processes as a cluster has: they meet, agree, stop after one step and end. Here they are threads."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

from accordion_bench.comm.sealed_store import AgreedStep, SealedStore
from accordion_bench.processes import rendezvous, waiting, watchdog
from accordion_bench.processes.placement import Placement
from accordion_bench.processes.watchdog import Watch
from accordion_bench.run_config import RunConfig
from tests.kit import composed
from tests.kit.processes import free_port, together
from tests.kit.stores import LocalStore

STEP = 0.05  # seconds


class Client:
    """One process of the run, on a thread; what it did when, on the clock of all processes of this machine."""

    def __init__(self, rank: int, processes: int, port: int, cfg: dict, timeout: float) -> None:
        self.rank, self.processes, self.port, self.cfg, self.timeout = rank, processes, port, cfg, timeout
        self.times: dict[str, float] = {}
        self.step = 0
        self.thread = threading.Thread(target=self.run)

    def run(self) -> None:
        rank, processes = self.rank, self.processes
        where = Placement("gloo", processes, 1, rank=rank, local_rank=rank, launcher="environment")
        self.note("begin")
        store = rendezvous._connect("127.0.0.1", str(self.port), rank, processes, self.timeout).under("run-0")
        with Watch(store, rank, processes, rank, self.timeout, hosts_store=rank == 0) as watch:
            if rank == 0:
                rendezvous._let_all_in(watch)
            rendezvous.agree(RunConfig.from_dict(self.cfg), where, watch)
            watch.wait_for_all("data")
            self.note("agreed")
            agreed = AgreedStep("stop", store)
            while not agreed.due(self.step, lambda: rank == 1 and self.step >= 4):
                if rank == 1 and self.step == 4:
                    self.note("asked")
                time.sleep(STEP)
                self.step += 1
            self.note("stopped")
        self.note("end")

    def note(self, what: str) -> None:
        self.times.setdefault(what, time.monotonic())


def clients(part: int, parts: int, processes: int, port: int, cfg: dict, folder: str, timeout: float = 300.0) -> None:
    """Every `parts`-th client, on threads of this process; writes what each has done."""
    mine = [Client(rank, processes, port, cfg, timeout) for rank in range(part, processes, parts)]
    for client in mine:
        client.thread.start()
    for client in mine:
        client.thread.join()
    Path(folder, f"part-{part}").write_text(json.dumps([[client.step, client.times] for client in mine]))


def measured(folder: Path, processes: int) -> dict[str, float]:
    """Seconds of each stretch, of the slowest client; all have stopped after one step."""
    found = [client for file in folder.glob("part-*") for client in json.loads(file.read_text())]
    assert len(found) == processes
    assert len({step for step, _ in found}) == 1, {step for step, _ in found}
    times = [times for _, times in found]
    assert all("end" in each for each in times)
    begin = min(each["begin"] for each in times)
    asked = min(each["asked"] for each in times if "asked" in each)
    stopped, end = (max(each[name] for each in times) for name in ("stopped", "end"))
    meet = max(each["agreed"] for each in times) - begin
    return {"meet and agree": meet, "stop": stopped - asked, "end": end - stopped}


def test_two_dozen_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog.os, "_exit", lambda status: pytest.fail("ended"))
    clients(0, 1, 24, free_port(), composed.run(tmp_path), str(tmp_path), 20.0)
    took = measured(tmp_path, 24)
    assert took["stop"] < 2 and took["end"] < 5, took


@pytest.mark.parametrize("rank", [0, 1, 10, 11])
def test_a_look_costs_the_same_among_a_thousand(rank, monkeypatch):
    """Of rank 0, of one beside it, of another machine's speaker and of one beside that: calls of the store."""
    calls = []
    for processes in (20, 1000):
        raw = LocalStore()
        store, watches = SealedStore(raw, processes), {}
        for other in range(processes):
            monkeypatch.setattr(waiting, "process_space", lambda machine=other // 10: f"machine-{machine}")
            watches[other] = Watch(store, other, processes, other % 10, 600)
            watches[other]._neighbours.come()
            watches[other]._beat()
            watches[other]._neighbours.settled()
        before = raw.calls
        assert watches[rank]._look() is None and watches[rank]._look() is None
        assert watches[rank]._neighbours.complete
        calls.append(raw.calls - before)
    assert calls[0] == calls[1] <= 16


@pytest.mark.slow
def test_a_thousand_processes(tmp_path):
    """The numbers of docs/machines.md; `pytest -s` shows them."""
    processes = int(os.environ.get("PROCESSES", "1000"))
    together(4, clients, 4, processes, free_port(), composed.run(tmp_path), str(tmp_path), seconds=280)
    took = measured(tmp_path, processes)
    print({name: round(seconds, 1) for name, seconds in took.items()})
    assert took["meet and agree"] < 120 and took["stop"] < 30 and took["end"] < 30, took
