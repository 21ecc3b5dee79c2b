"""Several machines: how processes find each other, what they compare, what the launchers say of a machine."""

import contextlib
import os
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from accordion_bench.comm.sealed_store import SECRET, SealedStore
from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.processes import placement, process_group, rendezvous
from accordion_bench.run_config import RunConfig, completed
from accordion_bench.runs.folder import RunFolder
from accordion_bench.tensors import kernels
from tests.kit import composed, processes, tiny
from tests.kit.stores import LocalStore

TORCHRUN_AGAIN = [*tiny.TORCHRUN[:3], "--max-restarts=1", *tiny.TORCHRUN[3:]]


@pytest.fixture(autouse=True)
def outside(monkeypatch):
    """No launcher has started the tests; nothing is remembered of another one."""
    monkeypatch.setattr(rendezvous, "_stores", {})
    for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_USE_AGENT_STORE", SECRET):
        monkeypatch.delenv(name, raising=False)


# ---- what the launchers say of a machine


@pytest.mark.parametrize(
    "environ, here",
    [
        ({}, 1),
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "SLURM_PROCID": "0"}, 4),  # torchrun inside srun
        ({"SLURM_PROCID": "5"}, 1),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_PROCID": "5", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1"}, 4),
        ({"SLURM_PROCID": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, 3),
        ({"SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "2,4(x3)", "SLURM_NTASKS_PER_NODE": "9"}, 2),
        (
            {  # RANK and WORLD_SIZE by hand, of srun's tasks
                "RANK": "5",
                "WORLD_SIZE": "8",
                "SLURM_PROCID": "5",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
            },
            4,
        ),
        (  # by hand, of something else than srun's tasks
            {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "4"},
            1,
        ),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, 4),
    ],
)
def test_processes_of_a_machine(environ, here):
    assert placement.processes_here(environ) == here


def slurm(rank: int, tasks: int, per_node: str, node: int = 0) -> dict[str, str]:
    return {
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
    }


def test_more_tasks_than_gpus():
    """Slurm's tasks count like torchrun's processes: nccl for one GPU each; that two share one must be typed."""
    where = placement.place(composed.config(), slurm(0, 8, "4(x2)"), 4)
    assert (where.backend, where.processes, where.device) == ("nccl", 8, "cuda")
    assert placement.place(composed.config("comm=gloo"), slurm(0, 8, "8"), 4).device == "cuda"
    several = slurm(0, 8, "8"), {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
    for environ in several:
        for comm in ("nccl", "auto"):
            with pytest.raises(ConfigError, match=r"comm.processes must be at most 4, the GPUs here, .*, got 8; type"):
                placement.place(composed.config(f"comm={comm}"), environ, 4)
        with pytest.raises(ConfigError, match=r"comm must be gloo or simulated on a machine without .*, got nccl"):
            placement.place(composed.config("comm=nccl"), environ, 0)


@pytest.mark.parametrize(
    "override, told",
    [
        ("comm.engine=dpp", "comm.engine must be one of exchange, ddp, got dpp; type comm.engine=ddp"),
        ("comm.overlap=1", "comm.overlap must be true or false, got 1; type"),
        ("comm.bucket_cap_mb=0", "comm.bucket_cap_mb must be a number above 0, got 0; type comm.bucket_cap_mb=25"),
        ("comm.interface=nosuch0", r"comm.interface must be null or an interface of this machine \(.*\), got nosuch0"),
    ],
)
def test_options_of_comm(override, told):
    with pytest.raises(ConfigError, match=told):
        placement.place(composed.config(override), {}, 0)


def test_an_old_runs_options_of_comm():
    cfg = composed.cfg()
    for key in ("overlap", "bucket_cap_mb", "engine", "interface"):
        del cfg["comm"][key]
    assert placement.place(RunConfig.from_dict(completed(cfg)), {}, 0).backend == "simulated"


def test_the_interface_of_gloo(monkeypatch):
    """What is typed; else what the environment says; else the loopback, where all processes are here."""

    def names() -> tuple[str | None, str | None]:
        return os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME")

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    with process_group.use_settings("eth7"):
        assert names() == ("eth7", "=eth7")  # to NCCL eth7 also means eth70
    loopback = process_group.loopback()
    assert loopback in ("lo", "lo0")
    with process_group.use_settings(None):
        assert names() == ("mine", f"={loopback}")
    assert names() == ("mine", None)
    for name, value in slurm(0, 4, "2(x2)").items():
        monkeypatch.setenv(name, value)
    with process_group.use_settings(None):
        assert names() == ("mine", None)


# ---- the meeting point


def find(port: int, rank: int, timeout: float = 5.0):
    return rendezvous._connect("127.0.0.1", str(port), rank, 2, timeout)


def test_a_port_that_another_program_has(monkeypatch):
    """Rank 0 cannot listen there; the others would wait for a greeting that never comes."""
    monkeypatch.setattr(rendezvous, "ANSWER", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"MASTER_PORT must be free .*, got {port}, .*; type export MASTER"):
            find(port, rank=0)
        with pytest.raises(ConfigError, match=rf"MASTER_PORT must lead to rank 0 of this run, got 127.0.0.1:{port}"):
            find(port, rank=1)


def test_nobody_at_the_port():
    port = processes.free_port()
    with pytest.raises(ConfigError, match=r"MASTER_ADDR and MASTER_PORT must lead to rank 0, .* comm.timeout=0.5 s"):
        find(port, rank=1, timeout=0.5)
    with pytest.raises(ConfigError, match="MASTER_PORT must be a number from 1 to 65535, got http; type"):
        rendezvous._connect("127.0.0.1", "http", 0, 2, 1.0)


def test_the_port_of_another_run(monkeypatch):
    """Two jobs of Slurm on one machine, with one port: the second one is refused, whichever of its ranks comes."""
    monkeypatch.setattr(rendezvous, "ANSWER", 0.5)
    port = processes.free_port()
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    store = find(port, rank=0)
    monkeypatch.setenv("SLURM_JOB_ID", "2")
    for rank, told in ((0, "MASTER_PORT must be free"), (1, "MASTER_PORT must lead to rank 0 of this run")):
        with pytest.raises(ConfigError, match=told):
            find(port, rank)
    store.set("x", "")  # unharmed


def test_of_two_that_come_as_one_rank_one_is_let_in(monkeypatch):
    """A stranger, or a command that was started twice; the other one reads a sentence, also when the run is over."""
    monkeypatch.setattr(rendezvous, "ANSWER", 2.0)
    port = processes.free_port()
    store, told = find(port, rank=0), []
    server = rendezvous._hosted[0][0]

    def come() -> None:
        try:
            told.append(find(port, rank=1))
        except ConfigError as refused:
            told.append(str(refused))

    both = [threading.Thread(target=come) for _ in range(2)]
    for one in both:
        one.start()
    while server.add("asks", 0) < 2:
        time.sleep(0.01)
    rendezvous._let_all_in(rendezvous.Watch(store, 0, 2, 0, 20.0))
    for one in both:
        one.join()
    (sentence,) = [one for one in told if isinstance(one, str)]
    assert sentence.endswith(f"where others listen, or have come as rank 1; type export MASTER_PORT={port + 1}")

    class Gone:
        def __getattr__(self, name: str):
            raise dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed.")

    assert rendezvous._ask_to_join(SealedStore(Gone(), 2), 1, 5.0) is None


def test_a_run_on_several_machines_without_a_secret_says_whom_it_believes():
    two = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    assert rendezvous.unsealed("a:1", two).startswith(f"this run believes whoever reaches a:1, since {SECRET} is not ")
    assert rendezvous.unsealed("a:1", {**two, SECRET: "of sixteen letters"}) == ""
    assert rendezvous.unsealed("a:1", {**two, "LOCAL_WORLD_SIZE": "2"}) == ""


@pytest.mark.slow
def test_a_rank_that_another_process_has_taken_reads_a_sentence(tmp_path):
    """And rank 0 has said that it is not sealed."""
    told = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(processes.free_port()), SECRET: ""}
    typed = [*tiny.COMMAND, *tiny.typed(tmp_path, "comm=gloo", "workers=2", "epochs=1")]
    jobs = [
        processes.started(typed, {**os.environ, **told, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)})
        for rank in (0, 1, 1)
    ]
    leader, *others = processes.outputs(jobs)
    assert leader.returncode == 0 and leader.stderr.startswith("warning: this run believes whoever reaches 127.0.0.1:")
    assert sorted(other.returncode for other in others) == [0, 2]
    (sentence,) = [other.stderr for other in others if other.returncode]
    assert sentence.startswith("MASTER_PORT must lead to rank 0 of this run") and sentence.count("\n") == 1


def test_only_who_has_the_secret_is_let_in(monkeypatch, capsys):
    """Whoever has another one, or none, is as if nobody had asked."""
    monkeypatch.setattr(rendezvous, "ANSWER", 1.0)
    port = processes.free_port()
    monkeypatch.setenv(SECRET, "of sixteen letters")
    store = find(port, rank=0)
    inside = threading.Thread(target=rendezvous._let_all_in, args=(rendezvous.Watch(store, 0, 2, 0, 20.0),))
    inside.start()
    for wrong, told in (
        ("of other letters", f"where others listen, or have another {SECRET}, or"),
        ("", "listen, or h"),
    ):
        monkeypatch.setenv(SECRET, wrong)
        with pytest.raises(ConfigError, match=rf"MASTER_PORT must lead to rank 0 of this run, .*{told}"):
            find(port, rank=1)
    assert capsys.readouterr().err.count("warning: ask-") == 2
    monkeypatch.setenv(SECRET, "of sixteen letters")
    monkeypatch.setattr(rendezvous, "ANSWER", 20.0)
    find(port, rank=1).set("x", "1")
    inside.join()
    assert store.read("x", str) == "1"


def watches(raw: dist.Store | LocalStore, ranks: int, timeout: float = 5.0) -> list[rendezvous.Watch]:
    store = SealedStore(raw, ranks)
    return [rendezvous.Watch(store, rank, ranks, rank, timeout) for rank in range(ranks)]


def test_a_restart_does_not_meet_what_was_left(monkeypatch):
    """torchrun's store outlives a restart of its processes, with the keys of those before."""
    server = SealedStore(LocalStore(), 2)
    launches = []
    for number in (16 * "a", 16 * "b"):
        inside: list = []
        follower = threading.Thread(target=lambda: inside.append(rendezvous._ask_to_join(server, 1, 5.0)))  # noqa: B023
        follower.start()
        monkeypatch.setattr(rendezvous, "_hosted", [(server, number)])
        rendezvous._let_all_in(watches(server.base, 2)[0])
        follower.join()
        launches += inside
    assert launches == [16 * "a", 16 * "b"]


def test_a_rank_that_does_not_come(monkeypatch):
    server = LocalStore()
    monkeypatch.setattr(rendezvous, "_hosted", [(SealedStore(server, 3), 16 * "c")])
    with pytest.raises(ConfigError, match=r"all 3 processes .* got 0.3, and rank 1, 2 .*comm.timeout=0.6"):
        rendezvous._let_all_in(watches(server, 3, 0.3)[0])


def test_strangers_who_ask_to_be_let_in(monkeypatch, capsys):
    """With words that mean nothing, and with a counter that promises more of them than there can be."""
    server = LocalStore()
    server.values |= {
        "asks": b"999999999999",
        "ask-1": b"",
        "ask-2": b"\xff",
        "ask-3": b"1 2 3",
        "ask-4": b"1 " + b"-" * 16,
    }
    monkeypatch.setattr(rendezvous, "_hosted", [(SealedStore(server, 2), 16 * "d")])
    with pytest.raises(ConfigError, match="and rank 1 has not come"):
        rendezvous._let_all_in(watches(server, 2, 0.3)[0])
    assert capsys.readouterr().err.count("warning: ask-") == 4


# ---- what they compare

WHERE = placement.Placement("gloo", 2, 2, launcher="environment")


def compare(cfg: dict, other: dict, where: placement.Placement = WHERE) -> None:
    """Rank 0 with `cfg`, rank 1 with `other`."""
    leader, follower = watches(LocalStore(), 2)
    rendezvous.agree(RunConfig.from_dict(cfg), WHERE, leader)
    rendezvous.agree(RunConfig.from_dict(other), replace(where, rank=1, local_rank=1), follower)


@pytest.mark.parametrize(
    "override, told",
    [
        ("seed=1", "seed must be 0 as on rank 0, got 1 on rank 1; type the same command on every machine"),
        ("optimizer.lr=0.5", "optimizer.lr must be 0.02 as on rank 0, got 0.5 on rank 1; type"),
        ("comm.overlap=false", "comm.overlap must be null as on rank 0, got false on rank 1; type"),
        ("comm.timeout=7", "comm.timeout must be 600 as on rank 0, got 7 on rank 1; type"),
        ("checkpoint.every=7", "checkpoint.every must be 0 as on rank 0, got 7 on rank 1; type"),
        ("resume=there", "resume must be null as on rank 0, got a run folder on rank 1; type"),
        ("compressor=topk", r"compressor\.\S+ must be .* as on rank 0, got .* on rank 1; type"),
    ],
)
def test_another_configuration_is_refused(override, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        compare(composed.run(tmp_path), composed.run(tmp_path, override))


def test_what_may_differ_between_machines(tmp_path):
    other = composed.run(tmp_path / "elsewhere", "comm.interface=lo", "tracker=tensorboard", "paths.data=there")
    compare(composed.run(tmp_path), other)


def test_other_programs_and_devices_are_refused(tmp_path, monkeypatch):
    cfg = composed.run(tmp_path)
    with pytest.raises(ConfigError, match="device must be cpu as on rank 0, got cuda on rank 1"):
        compare(cfg, cfg, placement.Placement("gloo", 2, 2, device="cuda"))
    leader, follower = watches(LocalStore(), 2)
    rendezvous.agree(RunConfig.from_dict(cfg), WHERE, leader)
    second = replace(WHERE, rank=1, local_rank=1)
    with monkeypatch.context() as without:
        without.setattr(kernels, "installed", lambda: False)
        with pytest.raises(ConfigError, match=r"version of numba must be .* got none on rank 1; install the same"):
            rendezvous.agree(RunConfig.from_dict(cfg), second, follower)
    monkeypatch.setattr("torch.__version__", "2.11.0")
    with pytest.raises(ConfigError, match=r"version of torch must be .* got 2.11.0 on rank 1; install the"):
        rendezvous.agree(RunConfig.from_dict(cfg), second, follower)


@pytest.mark.parametrize("garbage", ["", "[]", "7", "{", "[" * 100_000])
def test_a_plan_that_is_none(garbage, tmp_path, capsys):
    """It is as if rank 0 had said nothing."""
    raw = LocalStore()
    raw.set("plan", garbage)
    follower = watches(raw, 2, 0.2)[1]
    with pytest.raises(RuntimeError, match="wait timeout"):
        rendezvous.agree(RunConfig.from_dict(composed.run(tmp_path)), replace(WHERE, rank=1), follower)
    assert "warning: plan in the store of the run is no such thing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "meaning, garbage",
    [
        *((rendezvous.run_folder, text) for text in ("", "\0", "runs\n/x", "\x1b[2J")),
        *((rendezvous.earlier_run, text) for text in ("", '["a"]', '["a\\n", true]', '["a", 1]', "[]", "3")),
    ],
)
def test_a_run_folder_that_is_none(meaning, garbage, capsys):
    raw = LocalStore()
    raw.set("folder", garbage)
    assert SealedStore(raw, 2).read("folder", meaning) is None
    assert capsys.readouterr().err.startswith("warning: folder in the store of the run is no such thing")


def test_where_a_run_folder_lies():
    assert rendezvous.run_folder("results/runs/a b") == "results/runs/a b"
    assert rendezvous.run_folder("runs\u3000a\u00a0b") == "runs\u3000a\u00a0b"  # spaces as well
    assert rendezvous.earlier_run('["results/x", true]') == ("results/x", True)
    assert rendezvous.earlier_run('["", false]') == ("", False)


# ---- the whole way


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "elastic"])
def test_two_agents_of_torchrun(kind, tmp_path):
    """As on two machines, each with its own command."""
    jobs = processes.agents(kind, tiny.typed(tmp_path, "comm=gloo", "epochs=1"))
    ended = processes.outputs(jobs)
    assert [job.returncode for job in ended] == [0, 0], ended
    assert RunFolder(tiny.only(tmp_path)).read_json("summary.json")["workers"] == 4
    assert sorted(bool(job.stdout) for job in ended) == [False, True]  # only rank 0 prints


@pytest.mark.slow
def test_two_runs_at_once(tmp_path):
    """Of torchrun --standalone, of spawned processes, and of Slurm with a port each."""
    jobs, environ = [], {**os.environ, "OMP_NUM_THREADS": "1"}
    for number in range(2):
        typed = tiny.typed(tmp_path / f"torchrun-{number}", "comm=gloo", "epochs=2", f"seed={number}")
        jobs.append(processes.started([*tiny.TORCHRUN, *typed], environ))
        typed = tiny.typed(tmp_path / f"spawned-{number}", "comm=gloo", "comm.processes=2", "epochs=2")
        jobs.append(processes.started([*tiny.COMMAND, *typed], environ))
        typed = tiny.typed(tmp_path / f"slurm-{number}", "comm=gloo", "epochs=2")
        jobs += processes.tasks(typed, job=str(number))
    assert [job.returncode for job in processes.outputs(jobs, 250)] == [0] * 8
    for folder in tmp_path.iterdir():
        assert RunFolder(tiny.only(folder)).done


@pytest.mark.slow
def test_a_restart_goes_on(tmp_path):
    """torchrun starts the processes again after one was killed; `resume_sweep` goes on from the last checkpoint."""
    options = [
        "comm=gloo",
        "epochs=3",
        "checkpoint.every=4",
        "resume_sweep=true",
        "model._target_=tests.kit.faulty.Net",
    ]
    typed = tiny.typed(tmp_path / "runs", *options)
    marker = tmp_path / "killed"
    environ = {**os.environ, "FAULT": f"kill:1:20:{marker}"}
    (ended,) = processes.outputs([processes.started([*TORCHRUN_AGAIN, *typed], environ)], 120)
    assert ended.returncode == 0 and marker.exists(), ended.stderr
    folder = RunFolder(tiny.only(tmp_path / "runs"))
    assert folder.done and [row["epoch"] for row in folder.read_metrics()] == [0, 1, 2]
    assert "going on with" in ended.stdout


@pytest.mark.slow
def test_ctrl_c_under_slurm(tmp_path):
    """srun passes a signal on to all tasks; they agree on a step, save, and name the command that continues."""
    jobs = processes.tasks(tiny.typed(tmp_path, "comm=gloo", "epochs=100000"))
    until = time.monotonic() + 60
    while not any(file.read_text() for file in tmp_path.glob("*/metrics.jsonl")) and time.monotonic() < until:
        time.sleep(0.1)
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            os.kill(job.pid, signal.SIGTERM)
    ended = processes.outputs(jobs)
    assert [job.returncode for job in ended] == [143, 143], ended
    assert "continue with: python -m accordion_bench resume=" in ended[0].stderr


def test_an_option_that_one_side_lacks():
    """A key that only one side has is null on the other."""
    assert rendezvous.first_difference({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}) == ("a.c", None, 2)
    assert checks.show(None) == "null"


def test_a_timeout_that_no_clock_can_hold(monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    told = r"^comm.timeout must be a number above 0 and at most 1e\+08, got 1e\+30"
    with pytest.raises(ConfigError, match=told), rendezvous.meet(1e30):
        pass
