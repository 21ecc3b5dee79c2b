"""Workers that come and go behind links: one whose link is cut is gone for the others, and is told when it returns."""

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from accordion_bench.netlab.hosts import PORT, Hosts
from scripts import behind_links, kill_loop
from tests.kit import elastic, inside
from tests.kit.processes import forked

pytestmark = [pytest.mark.netlab, pytest.mark.usefixtures("allowed")]


def at_host(host: int, entrances: list[inside.Entrance], folder: Path, options: dict) -> None:
    """Host 0 has the store until all are over, each other one a worker."""
    inside.enter(entrances[host])
    place = Hosts.address(0), PORT
    if host == 0:
        store = dist.TCPStore(*place, None, True, wait_for_workers=False)
        elastic.wait_for((folder / "over").exists, 120)
        del store
        return
    os.environ["WORLD_SIZE"] = "3"
    elastic.work(place, host, folder / f"{host}.json", 120, (-1, ""), options)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["every_step", "diloco"])
def test_a_cut_link_costs_what_a_lost_worker_costs(tmp_path: Path, sync: str) -> None:
    """The others go on within the timeout and end at one place; who returns is told that it was left behind."""
    period = {} if sync == "every_step" else {"period": 2}
    options = {"sync": sync, "elastic": True, "min_workers": 2, "timeout": 3.0, "pace": 0.1, **period}
    with Hosts(4) as hosts, forked():
        context = multiprocessing.get_context("spawn")
        entrances = inside.entrances(hosts)
        children = [context.Process(target=at_host, args=(i, entrances, tmp_path, options)) for i in range(4)]
        for child in children:
            child.start()
        elastic.wait_for(lambda: hosts.counters()[3][0] > 30_000)
        hosts.cut(3)
        time.sleep(8)
        hosts.join(3)
        for child in children[1:]:
            child.join(60)
        (tmp_path / "over").touch()
        for child in children:
            child.join(10)
            child.kill()
    found = [json.loads((tmp_path / f"{host}.json").read_text()) for host in (1, 2, 3)]
    assert "the others went on without after 3 s" in found[2]["error"]
    assert found[0]["end"] == found[1]["end"]
    assert all((own["row"]["members"], own["row"]["lost"]) == (2, 1) for own in found[:2])
    assert max(own for one in found[:2] for own in one["took"].values()) < 3 + 2


@pytest.mark.slow
def test_a_run_ends_although_links_are_cut(capsys: pytest.CaptureFixture) -> None:
    """Under the launcher, which replaces workers whose link is down for long: the run ends well, nothing is left."""
    words = ["--mtbf", "6", "--minutes", "6", "--epochs", "12", "--ends", "cut", "kill"]
    assert kill_loop.main(["every_step", *words]) == 0
    said = capsys.readouterr().out
    assert "every_step: status 0" in said and "0 processes left over" in said


def test_each_worker_has_a_host_of_its_own(tmp_path: Path) -> None:
    """A process that has ended gives its host to the next one."""
    (tmp_path / "1").write_text("999999999")  # of no process
    assert [behind_links.free_host(4, tmp_path) for _ in range(2)] == [1, 2]
    (tmp_path / "1").write_text("999999999")
    assert behind_links.free_host(4, tmp_path) == 1
    assert [behind_links.free_host(4, tmp_path) for _ in range(2)] == [3, 3]
