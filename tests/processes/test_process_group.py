"""How the process group is made and what becomes of NCCL's errors: recorded, since no machine of ours has two GPUs."""

import datetime
import json
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from accordion_bench import train
from accordion_bench.comm.collectives import Comm
from accordion_bench.comm.sealed_store import SealedStore
from accordion_bench.options.checks import ConfigError
from accordion_bench.processes import machine, process_group, spawn, watchdog
from accordion_bench.processes.placement import Placement
from accordion_bench.run_config import RunConfig
from accordion_bench.training import launch
from tests.kit import composed
from tests.kit.stores import LocalStore
from tests.processes.test_placement import slurm

needs_nccl = pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")


@pytest.fixture
def asked(monkeypatch) -> list:
    """What is asked of CUDA and torch.distributed, in order; this machine pretends to have four GPUs."""
    calls: list = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("set_device", str(device))))
    monkeypatch.setattr(machine, "gpu_uuid", lambda device: f"GPU-{device.index}")
    monkeypatch.setattr(SealedStore, "of_torch", lambda self: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **named: calls.append(("init", args, named)))
    return calls


def join(rank: int, local_rank: int, backend: str = "nccl", store: LocalStore | None = None) -> None:
    where = Placement(backend, 8, 1, rank=rank, local_rank=local_rank, launcher="environment", device="cuda")
    process_group.join(where, SealedStore(store or LocalStore(), 8), 30.0)


@needs_nccl
def test_the_gpu_is_taken_before_and_the_group_bound_to_it(asked):
    """Else every rank opens a context on GPU 0, and sub-groups are made at their first use, one after the other."""
    join(6, 2)
    (first, device), (second, (backend,), named) = asked
    assert (first, device, second, backend) == ("set_device", "cuda:2", "init", "nccl")
    assert named["device_id"] == torch.device("cuda:2") and (named["rank"], named["world_size"]) == (6, 8)
    assert named["timeout"] == named["pg_options"]._timeout == datetime.timedelta(seconds=30)
    assert isinstance(named["pg_options"], dist.ProcessGroupNCCL.Options)
    assert named["pg_options"].is_high_priority_stream


def test_gloo_is_asked_for_nothing_of_this(asked):
    join(6, 2, "gloo")
    ((_, _, named),) = asked
    assert not {"device_id", "pg_options"} & named.keys()


@needs_nccl
def test_two_processes_that_share_a_gpu_do_not_get_as_far_as_nccl(asked, monkeypatch):
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)  # of each; the launcher has shown both the same one
    store = LocalStore()
    join(0, 0, store=store)
    with pytest.raises(ConfigError, match=r"got GPU-0 for the ranks 0 and 1; type comm=gloo"):
        join(1, 1, store=store)
    assert [call[0] for call in asked].count("init") == 1


@needs_nccl
def test_sub_groups_have_options_of_their_own(monkeypatch):
    """The same in every process and for every sub-group, members or not: splitting is a collective of all."""
    made: list = []

    def new_group(ranks, **named):
        made.append((ranks, named))
        return dist.ProcessGroup(dist.HashStore(), 0, 1)

    monkeypatch.setattr(dist, "new_group", new_group)
    for backend, high in (("nccl", True), ("gloo", False)):
        for rank in range(4):
            made.clear()
            monkeypatch.setattr(dist, "is_initialized", lambda: True)
            monkeypatch.setattr(dist, "get_backend", lambda group=None, backend=backend: backend)
            comm = Comm(1, 4, rank)
            comm.timeout = 30.0
            comm.groups(2)
            assert [ranks for ranks, _ in made] == [[0, 1], [2, 3]]
            options = [named.get("pg_options") for _, named in made]
            assert [bool(own and own.is_high_priority_stream) for own in options] == [high, high]
            assert options[0] is not options[1] or not high
            assert all(named["timeout"] == datetime.timedelta(seconds=30) for _, named in made)


@pytest.mark.parametrize(
    "backend, failed, way",
    [("nccl", True, "abort"), ("nccl", False, "destroy"), ("gloo", True, "destroy"), ("gloo", False, "destroy")],
)
def test_who_fails_over_nccl_waits_for_no_collective_that_nobody_ends(backend, failed, way, monkeypatch):
    ways: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda group=None: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ways.append("destroy"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda: ways.append("abort"))
    process_group.leave(failed)
    assert ways == [way]


def test_gpus_of_other_kinds_are_told_by_the_leader(monkeypatch, capsys):
    monkeypatch.setattr(machine, "gpu_model", lambda device: "H200")
    for rank, device in ((0, "cuda:0"), (1, "cuda:0"), (0, "cpu")):
        comm = SimpleNamespace(device=torch.device(device), processes=2, leader=rank == 0)
        comm.gather_objects = lambda said: [said, "A100"]
        launch.warn_of_other_models(comm)  # type: ignore[arg-type]
    told = "warning: this run has GPUs of 2 kinds: H200 (rank 0), A100 (rank 1); the slowest sets the pace, "
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(told)


@pytest.mark.parametrize(
    "backend, device, deterministic, told",
    [
        ("nccl", "cuda", "false", "(nccl, 2 processes x 2 on cuda)"),
        ("nccl", "cuda", "true", "(nccl, 2 processes x 2 on cuda, deterministic kernels)"),
        ("gloo", "cuda", "false", "(gloo, 2 processes x 2 on cuda, exchanging through the host's memory)"),
        ("gloo", "cpu", "true", "(gloo, 2 processes x 2 on cpu)"),
    ],
)
def test_the_header_says_what_the_exchange_goes_through(backend, device, deterministic, told):
    cfg = composed.cfg("workers=4", f"deterministic={deterministic}")
    where = Placement(backend, 2, 2, device=device)
    assert told in train.header(RunConfig.from_dict(cfg), where, composed.parts_of(cfg))


@pytest.mark.parametrize("backend, interface, told", [("nccl", "eth1", 1), ("gloo", "eth1", 0), ("nccl", "null", 0)])
def test_bytes_that_no_interface_counts_are_told(backend, interface, told):
    cfg = composed.cfg("workers=4", f"comm={backend}", f"comm.interface={interface}")
    found = [line for line in composed.warnings(cfg, set()) if "link_sent_bytes" in line]
    assert len(found) == told
    assert not told or found[0].startswith(
        "comm.interface=eth1 does not count all that NCCL sends: traffic over NVLink"
    )


# ---- what gloo and NCCL read in the environment

SEVERAL_MACHINES = slurm(0, 8, 4)


@pytest.mark.parametrize(
    "interface, environ, chosen",
    [
        ("eth1", {}, {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}),  # NCCL: eth1 is eth10, too
        ("eth1", SEVERAL_MACHINES, {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}),
        (None, SEVERAL_MACHINES, {}),
        (None, {"NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": "ib0"}, {}),
        (None, {"NCCL_SOCKET_IFNAME": "^docker"}, {"GLOO_SOCKET_IFNAME": "lo"}),
    ],
)
def test_interfaces_are_named_as_each_reads_them(interface, environ, chosen, monkeypatch):
    monkeypatch.setattr(process_group, "loopback", lambda: "lo")
    found = process_group.settings(interface, environ)
    assert found.pop("TORCH_NCCL_ASYNC_ERROR_HANDLING") == "2"
    assert found == chosen


@pytest.mark.parametrize("name", ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"])
def test_how_nccl_handles_errors_may_be_exported(name):
    """Ours ends no process, so that a sentence can be told; the user's stays."""
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in process_group.settings("eth1", {name: "3"})


# ---- NCCL's errors in our words

TIMED_OUT = r"^rank 3 has waited for another process for comm.timeout=30 s: .*; type comm.timeout=60 "
LOST = r"^rank 3 has lost another process, whose own output says why "


@pytest.mark.parametrize(
    "text, told, kind",
    [
        ("NCCL operation timed out", TIMED_OUT, watchdog.TIMED_OUT),
        ("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(...)", TIMED_OUT, watchdog.TIMED_OUT),
        (
            "NCCL communicator was aborted on rank 3. Original reason for failure was: [Rank 3] Watchdog caught "
            "collective operation timeout: WorkNCCL(SeqNum=7) ran for 30001 milliseconds before timing out.",
            TIMED_OUT,
            watchdog.TIMED_OUT,
        ),
        ("NCCL communicator was aborted after a previous error", LOST, watchdog.LOST),
        ("NCCL operation failed", LOST, watchdog.LOST),
        ("NCCL Async Error: remote process exited or there was a network error", LOST, watchdog.LOST),
        (process_group.LOST, LOST, watchdog.LOST),
        (process_group.TIMED_OUT, TIMED_OUT, watchdog.TIMED_OUT),
        ("NCCL error: unhandled cuda error", "", "DistBackendError"),  # its own fault: the traceback
    ],
)
def test_what_nccl_says_becomes_our_sentence(text, told, kind):
    error = dist.DistBackendError(text) if kind == "DistBackendError" else RuntimeError(text)
    failure = watchdog.failure_of(error, 3, 30.0)
    assert failure["kind"] == kind
    if told:
        assert re.search(told, failure["message"]) and failure["traceback"] == failure["message"]


class Backend:
    def __init__(self, found: str) -> None:
        self.found = found

    def get_error(self):
        from torch._C._distributed_c10d import ErrorType

        return getattr(ErrorType, self.found)


class Group:
    def __init__(self, found: str) -> None:
        self.found = found

    def _get_backend(self, device: torch.device) -> Backend:
        assert device.type == "cuda"
        return Backend(self.found)


@pytest.fixture
def nccl_has_found(monkeypatch):
    """As if the process group were NCCL's, and its watchdog had found this."""

    def found(what: str, backend: str = "nccl") -> None:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_backend", lambda group=None: backend)
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=Group(what)))

    return found


@pytest.mark.parametrize(
    "what, backend, told",
    [
        ("SUCCESS", "nccl", ""),
        ("TIMEOUT", "nccl", process_group.TIMED_OUT),
        ("COMM_ERROR", "nccl", process_group.LOST),
        ("REMOTE_ERROR", "nccl", process_group.LOST),
        ("TIMEOUT", "gloo", ""),
    ],
)
def test_the_watchdog_of_nccl_is_asked(what, backend, told, nccl_has_found):
    assert process_group.trouble() == ""
    nccl_has_found(what, backend)
    assert process_group.trouble() == told


class NonFinite(RuntimeError):
    pass


@pytest.mark.parametrize(
    "what, error, kind",
    [
        ("SUCCESS", NonFinite("a gradient is not finite"), "NonFinite"),
        ("TIMEOUT", NonFinite("a gradient is not finite"), watchdog.TIMED_OUT),  # tensors hold anything then
        ("TIMEOUT", ValueError("boom"), watchdog.TIMED_OUT),
        ("COMM_ERROR", NonFinite("a gradient is not finite"), watchdog.LOST),
        ("COMM_ERROR", RuntimeError("CUDA error: an illegal memory access was encountered"), "RuntimeError"),
    ],
)
def test_what_only_follows_from_a_broken_group_is_not_told_as_the_cause(what, error, kind, nccl_has_found):
    nccl_has_found(what)
    assert watchdog.failure_of(error, 0, 30.0)["kind"] == kind


def test_a_process_that_waits_for_its_gpu_is_ended_with_the_sentence(nccl_has_found, monkeypatch):
    """Its main thread is where no exception comes; the watch looks, tells all, and ends it."""
    store = SealedStore(LocalStore(), 2)
    watch = watchdog.Watch(store, 1, 2, 1, 30.0)
    assert watch._look() is None
    nccl_has_found("TIMEOUT")
    failure = watch._look()
    assert failure is not None and failure["kind"] == watchdog.TIMED_OUT and "comm.timeout=30 s" in failure["message"]
    assert json.loads(store.read("failure", str) or "")["rank"] == 1  # the others read it there
    ended: list = []
    monkeypatch.setattr(watchdog, "GRACE", 0.0)
    monkeypatch.setattr(watchdog.os, "_exit", ended.append)
    watch._end(failure)
    assert ended == [1]


def test_so_is_a_spawned_one(monkeypatch):
    """Once: NCCL gives up at its second look, and the main thread has not left when the grace is over."""
    found = iter(["", process_group.TIMED_OUT, process_group.TIMED_OUT])
    told: list[dict] = []
    monkeypatch.setattr(process_group, "trouble", lambda: next(found, ""))
    monkeypatch.setattr(spawn, "LOOK", 0.0)
    monkeypatch.setattr(spawn, "GRACE", 0.0)

    def end(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(spawn.os, "_exit", end)
    with pytest.raises(SystemExit, match="1"):
        spawn._end_after_nccl(3, 30.0, SimpleNamespace(send=told.append))
    assert [(one["rank"], one["kind"]) for one in told] == [(3, watchdog.TIMED_OUT)]


def test_a_group_that_was_left_in_time_ends_nobody(monkeypatch):
    looks = iter([process_group.LOST, ""])

    def look() -> str:
        found = next(looks, None)
        if found is None:
            raise StopIteration  # of the test: it went on looking
        return found

    monkeypatch.setattr(process_group, "trouble", look)
    monkeypatch.setattr(spawn, "LOOK", 0.0)
    monkeypatch.setattr(spawn, "GRACE", 0.0)
    with pytest.raises(StopIteration):
        spawn._end_after_nccl(3, 30.0, SimpleNamespace(send=pytest.fail))


@needs_nccl
def test_torchs_nccl_tells_its_errors():
    assert callable(getattr(dist.ProcessGroupNCCL, "get_error", None))
    assert hasattr(dist.ProcessGroupNCCL.Options(), "_timeout")
