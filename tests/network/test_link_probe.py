"""The probe, between processes of this machine."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from accordion_bench.network import link_probe
from accordion_bench.network.collective_costs import KINDS
from accordion_bench.network.link_probe import Place, _groups, placed, probe_link
from accordion_bench.network.links import read_measured_link
from accordion_bench.options.checks import ConfigError
from tests.kit.processes import free_port, in_two, together

TOLD = {
    "RANK": "0",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "x",
    "MASTER_PORT": "1",
}


def probing(rank: int, port: int, out: Path, processes: int, per_machine: int, sizes: list[int]) -> None:
    """One of the processes that a launcher would have started."""
    numbers = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": rank % per_machine, "LOCAL_WORLD_SIZE": per_machine}
    os.environ.update({name: str(number) for name, number in numbers.items()}, CUDA_VISIBLE_DEVICES="")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    link_probe.WIRE[:] = sizes
    link = probe_link(0.5, out if rank == 0 else out / "nobody writes here")
    assert not dist.is_initialized()
    if rank == 0:
        assert read_measured_link(out) == link
    assert link.workers_per_machine == per_machine


def test_two_processes_find_a_link(tmp_path):
    out = tmp_path / "link.json"
    in_two(probing, free_port(), out, 2, 1, [1 << 10, 1 << 16, 1 << 20, 1 << 24])
    link = read_measured_link(out)
    assert (link.workers, link.machines, link.backend, link.device) == (2, 2, "gloo", "cpu")
    for cost in link.kinds.values():
        assert 1e8 < cost.bandwidth < 1e12  # between processes of one machine
        assert 0 < cost.latency < 0.1
        assert 0 < cost.cpu < 1e-6
    assert not link.inside and not link.between


def grouped(rank: int, store: Path) -> None:
    """Two machines of two processes: 0 and 1, 2 and 3."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    groups = dict(_groups(Place(rank, 4, rank % 2, 2), torch.device("cpu")))
    all_of = dist.get_process_group_ranks
    assert (groups["kinds"].members, groups["kinds"].together) == (None, None)
    assert all_of(groups["inside"].members) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert all_of(groups["between_together"].members) == [rank % 2, rank % 2 + 2]
    assert groups["inside"].together is groups["between_together"].together is None  # all begin together
    if rank % 2 == 0:
        assert all_of(groups["between"].members) == all_of(groups["between"].together) == [0, 2]
    assert ("between" in groups) == (rank % 2 == 0)
    dist.destroy_process_group()


def test_machines_of_several_processes_have_three_kinds_of_groups(tmp_path):
    together(4, grouped, tmp_path / "meet")


@pytest.mark.slow
def test_machines_of_several_processes_are_probed_at_both_levels(tmp_path):
    out = tmp_path / "link.json"
    together(4, probing, free_port(), out, 4, 2, [1 << 10, 1 << 20, 1 << 25])
    link = read_measured_link(out)
    assert (link.workers, link.machines) == (4, 2)
    for level in ("kinds", "inside", "between", "between_together"):
        assert all(getattr(link, level)[kind].bandwidth > 1e7 for kind in KINDS), level


def unlike(rank: int, port: int, out: Path) -> None:
    """Two processes on one machine, one on the other, as their launchers say."""
    with pytest.raises(ConfigError, match=r"--nproc-per-node must be the same on all machines, got 1 and 2 for 3"):
        probing(rank, port, out, 3, 2 if rank < 2 else 1, [1 << 10])


def test_machines_that_differ_are_refused(tmp_path):
    together(3, unlike, free_port(), tmp_path / "link.json")


def test_the_times_of_a_probe_grow_with_its_messages(tmp_path):
    in_two(growing, tmp_path / "meet")


def growing(rank: int, store: Path) -> None:
    """Times of a process group that is there already; the second call gives the same messages."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    link_probe.WIRE[:] = [1 << 10, 1 << 24]
    group = link_probe.LinkGroup(None, None, torch.device("cpu"))
    told: list[str] = []
    rows = link_probe.time_collectives(group, 0.1, idle=0.0, tell=told.append)
    assert told == [f"{kind} of 2 workers" for kind in KINDS]
    for kind in KINDS:
        small, large = (row for row in rows if row["collective"] == kind)
        assert small["seconds"] < large["seconds"]
        assert (small["wire_bytes"], large["wire_bytes"]) == (1 << 10, 1 << 24)
        assert len(large["repetitions"]) >= link_probe.FEWEST
        assert "link_sent_bytes" not in large
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "changed, why",
    [
        (
            {"WORLD_SIZE": None},
            "probe must run with at least two processes, got none; type torchrun --nproc-per-node=1",
        ),
        ({"WORLD_SIZE": "1"}, "probe must run with at least two processes, got one; type torchrun"),
        ({"MASTER_ADDR": None}, "probe must be started by torchrun, got no MASTER_ADDR; type torchrun"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE must be a whole number, as torchrun sets it, got 'x'; type"),
    ],
)
def test_a_probe_without_peers_is_refused(changed, why, monkeypatch, tmp_path):
    told = {name: value for name, value in {**TOLD, **changed}.items() if value is not None}
    with pytest.raises(ConfigError) as refused:
        placed(told)
    assert str(refused.value).startswith(why)


def test_the_seconds_of_a_probe_are_a_number_above_0(tmp_path):
    with pytest.raises(ConfigError, match="--seconds must be a number above 0, got 0; type --seconds=20"):
        probe_link(0, tmp_path / "link.json")


def test_two_levels_are_several_machines_of_several_processes():
    assert placed(TOLD).two_levels
    assert not placed({**TOLD, "WORLD_SIZE": "2"}).two_levels
    assert not placed({**TOLD, "LOCAL_WORLD_SIZE": "1"}).two_levels
