"""A quorum on three hosts, one of them late: who averages with whom, and bytes; needs root and network namespaces."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accordion_bench.netlab import hosts
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed, inside, late, local
from tests.kit.processes import free_port, together

pytestmark = [pytest.mark.netlab, pytest.mark.usefixtures("allowed")]
AGREE = 0.03
PACE, NAP = 0.1, 0.6  # seconds: all sleep before each step, and the late host once
RUN = [
    "model=resnet20",
    "dataset=synthetic",
    "dataset.train_size=48",
    "dataset.test_size=6",
    "batch_size=2",
    "epochs=2",
    "comm=gloo",
    "comm.interface=eth0",
    "comm.workers_per_process=1",
    "comm.processes=3",
    "sync=diloco",
    "sync.period=2",
    "sync.quorum=2",
    "checkpoint.every=0",
]


def in_each(host: int, entrances: list[inside.Entrance], port: int, cfg: dict, folder: Path) -> None:
    inside.enter(entrances[host])
    store = late.connected(host, 3, os.environ["MASTER_ADDR"], port)
    found = late.trained(host, cfg, folder, store, {(2, 0): NAP}, PACE)
    torch.save(found, folder / f"{host}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_fast_hosts_do_not_wait_and_bytes_are_those_of_the_ledger(tmp_path):
    """8 steps an epoch, an averaging every 2: the late host misses some, is sent what it lacks, and takes part."""
    cfg = composed.cfg(*RUN, f"paths.runs={tmp_path}")
    folder = RunFolder.create(str(tmp_path), "run", cfg).path
    with hosts.Hosts(3, 1e9, {2: 1e8}) as lab:
        together(3, in_each, inside.entrances(lab), free_port(), cfg, folder, seconds=200)
    found = [torch.load(folder / f"{host}.pt", weights_only=False) for host in range(3)]
    took = {k: [a[0] for a in who] for each in found for k, who in each["who"].items() if who}
    joined = min(k for k, who in took.items() if 2 in who)
    assert took[0] == [0, 1] and joined >= 1
    for k in range(joined):  # the fast ones have gone on, each with two steps more
        assert found[0]["steps"][k] == found[1]["steps"][k] == 2 * (k + 1)
    assert found[2]["steps"][joined] == 2
    assert local.all_equal([each["shared"] for each in found])
    row = found[0]["rows"][-1]
    assert row["took_part"] == sum(map(len, took.values())) / len(took) < 3
    counted = row["wire_bytes"] + row["control_wire_bytes"]
    print(f"{joined} averagings missed; interface / ledger = {row['link_sent_bytes'] / counted:.4f}")
    assert abs(row["link_sent_bytes"] / counted - 1) < AGREE, row
