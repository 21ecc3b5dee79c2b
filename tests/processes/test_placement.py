"""Where workers live: the decision, and each way of starting them."""

import contextlib
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accordion_bench import __main__ as command
from accordion_bench import train
from accordion_bench.comm.sealed_store import SECRET
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.processes import machine, placement, rendezvous
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed, tiny
from tests.kit.processes import forked, together

HOUSE = conf_dir().parent


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of spawned processes


def torchrun(rank: int, processes: int, local: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
    }


def slurm(rank: int, processes: int, local: int) -> dict[str, str]:
    return {"SLURM_STEP_NUM_TASKS": str(processes), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % local)}


def openmpi(rank: int, processes: int, local: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_SIZE": str(processes),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank % local),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local),
    }


def by_hand(environ: dict[str, str]) -> dict[str, str]:
    """As a script of one's own between srun or mpirun and the program says it, without LOCAL_RANK."""
    rank = environ.get("SLURM_PROCID", environ.get("OMPI_COMM_WORLD_RANK", ""))
    size = environ.get("SLURM_STEP_NUM_TASKS", environ.get("OMPI_COMM_WORLD_SIZE", ""))
    return {**environ, "RANK": rank, "WORLD_SIZE": size}


# overrides, environment, GPUs -> backend, processes, workers per process, device
DECISIONS = [
    ("", {}, 0, "simulated 1 4 cpu"),
    ("", {}, 1, "simulated 1 4 cuda"),
    ("", {}, 2, "nccl 2 2 cuda"),
    ("", {}, 3, "nccl 3 1 cuda"),
    ("", {}, 8, "nccl 8 1 cuda"),
    ("workers=8", {}, 8, "nccl 8 1 cuda"),
    ("workers=8", {}, 0, "simulated 1 8 cpu"),
    ("device=cpu", {}, 8, "simulated 1 4 cpu"),
    ("comm.processes=2", {}, 0, "gloo 2 2 cpu"),
    ("comm=gloo comm.processes=2", {}, 1, "gloo 2 2 cuda"),
    ("comm.processes=2 device=cpu", {}, 1, "gloo 2 2 cpu"),
    ("comm.processes=2", {}, 8, "nccl 2 2 cuda"),
    ("comm.processes=3", {}, 0, "gloo 3 1 cpu"),
    ("comm.workers_per_process=8", {}, 0, "simulated 1 8 cpu"),
    ("workers=4 comm.workers_per_process=2", {}, 0, "gloo 2 2 cpu"),
    ("workers=4 comm.workers_per_process=4", {}, 0, "simulated 1 4 cpu"),
    ("comm=gloo", {}, 0, "gloo 4 1 cpu"),
    ("comm=gloo comm.processes=1", {}, 0, "gloo 1 4 cpu"),
    ("comm=gloo comm.workers_per_process=2", {}, 0, "gloo 2 2 cpu"),
    ("comm=gloo workers=6 comm.workers_per_process=3", {}, 0, "gloo 2 3 cpu"),
    ("comm=gloo workers=6 comm.processes=3", {}, 0, "gloo 3 2 cpu"),
    ("comm=gloo comm.processes=3 comm.workers_per_process=2", {}, 0, "gloo 3 2 cpu"),
    ("comm=gloo comm.processes=2 comm.workers_per_process=2 workers=4", {}, 0, "gloo 2 2 cpu"),
    ("comm=simulated workers=16", {}, 8, "simulated 1 16 cuda"),
    ("comm.engine=ddp comm=gloo", {}, 0, "gloo 4 1 cpu"),
    ("comm.engine=ddp comm.processes=2", {}, 0, "gloo 2 1 cpu"),  # DistributedDataParallel has one worker in each
    ("comm.engine=ddp", {}, 2, "nccl 2 1 cuda"),
    ("comm.engine=ddp", torchrun(1, 2, 2), 0, "gloo 2 1 cpu"),
    ("comm=nccl", {}, 1, "nccl 1 4 cuda"),
    ("comm=nccl workers=16", {}, 8, "nccl 8 2 cuda"),
    ("comm=nccl comm.processes=2", {}, 2, "nccl 2 2 cuda"),
    ("", torchrun(1, 2, 2), 0, "gloo 2 2 cpu"),
    ("", torchrun(3, 8, 4), 0, "gloo 8 1 cpu"),
    ("", torchrun(3, 8, 4), 4, "nccl 8 1 cuda"),
    ("", torchrun(1, 2, 1), 1, "nccl 2 2 cuda"),  # two machines with one GPU each
    ("", torchrun(1, 2, 2), 1, "nccl 2 2 cuda"),  # each sees one: its own, or they are told when they meet
    ("", slurm(5, 8, 4), 1, "nccl 8 1 cuda"),  # srun --gpus-per-task=1, or CUDA_VISIBLE_DEVICES=$SLURM_LOCALID
    ("comm=nccl", by_hand(slurm(5, 8, 4)), 1, "nccl 8 1 cuda"),
    ("", by_hand(slurm(5, 8, 4)), 4, "nccl 8 1 cuda"),
    ("", openmpi(5, 8, 4), 4, "nccl 8 1 cuda"),
    ("", openmpi(5, 8, 4), 0, "gloo 8 1 cpu"),
    ("", openmpi(5, 8, 4), 1, "nccl 8 1 cuda"),
    ("", {**openmpi(5, 8, 4), **slurm(0, 2, 1)}, 4, "nccl 8 1 cuda"),  # mpirun's daemons are srun's tasks
    ("", by_hand(openmpi(5, 8, 4)), 4, "nccl 8 1 cuda"),
    ("", {**slurm(0, 2, 1), **torchrun(5, 8, 4)}, 4, "nccl 8 1 cuda"),  # torchrun's agents are srun's tasks
    (
        "",
        {"RANK": "5", "WORLD_SIZE": "8", "x": ""},
        1,
        "nccl 8 1 cuda",
    ),  # no local rank: one GPU needs none
    ("workers=8", torchrun(1, 2, 2), 0, "gloo 2 4 cpu"),
    ("comm=gloo comm.workers_per_process=3", torchrun(1, 2, 2), 4, "gloo 2 3 cuda"),
    ("", torchrun(0, 1, 1), 0, "gloo 1 4 cpu"),
    ("", slurm(5, 8, 4), 0, "gloo 8 1 cpu"),
    ("comm=nccl", slurm(5, 8, 4), 4, "nccl 8 1 cuda"),
    ("", {"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, 0, "simulated 1 4 cpu"),  # sbatch without srun
    ("", {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, 0, "simulated 1 4 cpu"),
]


@pytest.mark.parametrize("overrides, environ, gpus, decision", DECISIONS)
def test_placement(overrides, environ, gpus, decision):
    where = placement.place(composed.config(*overrides.split()), environ, gpus)
    assert f"{where.backend} {where.processes} {where.workers_per_process} {where.device}" == decision
    ranks = placement.environment_ranks(environ) or (1, 0, 0)
    assert (where.launcher, where.rank, where.local_rank) == ("environment" if len(environ) > 2 else "self", *ranks[1:])


@pytest.mark.parametrize(
    "overrides, environ, told",
    [
        ("comm.processes=3", torchrun(0, 2, 2), r"comm.processes must be 2, the number .* launcher .*, got 3; type"),
        ("comm=simulated", torchrun(0, 2, 2), r"comm must be gloo, nccl or auto in one of 2 .*, got simulated; type"),
        ("comm=simulated", slurm(0, 4, 2), r"comm must be gloo, nccl or auto in one of 4 .*, got simulated; type"),
        ("workers=5", torchrun(0, 2, 2), r"workers must be a multiple of comm.processes=2, got 5; type workers=2"),
        ("comm.engine=ddp workers=4", torchrun(0, 2, 2), r"workers must be .* = 2 x 1, got 4; type workers=2"),
    ],
)
def test_what_contradicts_the_launcher_is_refused(overrides, environ, told):
    with pytest.raises(ConfigError, match=told):
        placement.place(composed.config(*overrides.split()), environ, gpus=0)


@pytest.mark.parametrize(
    ("environ", "size", "name"),
    [
        (torchrun(2, 2, 2), "WORLD_SIZE", "RANK"),
        (slurm(2, 2, 2), "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        (openmpi(2, 2, 2), "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ],
)
def test_a_rank_that_is_none_of_the_processes_is_refused(environ, size, name):
    """It would wait for the others, and they for the missing one, until the timeout."""
    with pytest.raises(ConfigError, match=f"^{name} must be below {size}=2, .*, got 2; type export {name}=1$"):
        placement.environment_ranks(environ)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_what_is_no_number_in_the_environment_is_a_sentence(name):
    told = f"^{name} must be a whole number, as launchers set it, got 'two'; type unset {name}$"
    with pytest.raises(ConfigError, match=told):
        placement.place(composed.config(), {**torchrun(0, 2, 2), name: "two"}, gpus=0)


@pytest.mark.parametrize(
    "environ",
    [
        torchrun(6, 8, 4),
        slurm(6, 8, 4),
        openmpi(6, 8, 4),
        by_hand(slurm(6, 8, 4)),
        by_hand(openmpi(6, 8, 4)),
        {**openmpi(6, 8, 4), **slurm(0, 2, 1)},
        {**slurm(0, 2, 1), **torchrun(6, 8, 4)},
    ],
)
def test_the_third_process_of_a_machine_takes_its_third_gpu(environ):
    where = placement.place(composed.config(), environ, 4)
    assert (where.rank, where.local_rank, machine.own_gpu(where.local_rank, 4).index) == (6, 2, 2)
    assert machine.own_gpu(where.local_rank, 1).index == 0  # it sees one alone: its own


def test_a_rank_that_nobody_gives_a_place_on_its_machine_is_refused():
    environ = {"RANK": "1", "WORLD_SIZE": "2"}
    told = r"^LOCAL_RANK must be set where a process sees several GPUs, got RANK=1 .* 4 GPUs, .*; type export "
    for comm in ("auto", "nccl", "gloo"):
        with pytest.raises(ConfigError, match=told):
            placement.place(composed.config(f"comm={comm}"), environ, 4)
    assert placement.place(composed.config("device=cpu"), environ, 4).backend == "gloo"


@pytest.mark.parametrize("comm", ["auto", "nccl"])
def test_sharing_a_gpu_over_gloo_must_be_typed(comm):
    with pytest.raises(ConfigError, match=r"comm.processes must be at most 1, .*, comm=gloo lets .*, got 2"):
        placement.place(composed.config(f"comm={comm}", "comm.processes=2"), {}, 1)


@pytest.mark.parametrize(
    "launcher, told", [(openmpi, "under OpenMPI needs .*; type mpirun -x MASTER_ADDR="), (slurm, "under Slurm needs ")]
)
def test_a_launcher_without_an_address(launcher, told, monkeypatch):
    for name, value in launcher(0, 2, 2).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=told), rendezvous.meet(5.0):
        pass


def test_slurm_without_an_address(monkeypatch, tmp_path):
    for name, value in slurm(0, 2, 2).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="needs the variables MASTER_ADDR and MASTER_PORT, got not both; type export"):
        train.run(composed.run(tmp_path / "runs", "comm=auto"))
    assert not (tmp_path / "runs").exists()


# ---- spawned processes


UNUSED = ("hydra", "omegaconf", "torchvision", "pandas", "numba", "llvmlite")


def test_spawned_processes(tmp_path, monkeypatch):
    """Two processes with two workers each: end to end, equal to one process, children without Hydra and numba."""
    modules = tmp_path / "modules"
    modules.mkdir()
    monkeypatch.setenv("TINY_MODULES", str(modules))
    spawned = composed.run(tmp_path / "runs", "comm=gloo", "comm.processes=2", "comm.workers_per_process=2")
    train.run(spawned)
    loaded = {int(file.name): set(file.read_text().split()) for file in modules.iterdir()}
    children = [names for pid, names in loaded.items() if pid != os.getpid()]
    assert len(children) == 2
    for names in children:
        assert not {name for name in names if name.split(".")[0] in UNUSED}
        assert "torch._dynamo" not in names
    assert multiprocessing.active_children() == []

    train.run(composed.run(tmp_path / "single"))
    one, two = (RunFolder(tiny.only(tmp_path / name)).read_json("summary.json") for name in ("single", "runs"))
    assert RunFolder(tiny.only(tmp_path / "runs")).done
    assert (one["workers"], two["workers"]) == (4, 4)
    assert {k: v for k, v in one.items() if "bytes" in k} == {k: v for k, v in two.items() if "bytes" in k}
    assert one["train_loss"] == pytest.approx(two["train_loss"], rel=1e-4)


@pytest.mark.parametrize(
    "trouble, told",
    [
        ("kill:1:9", r"^rank 1 failed:\nit ended with exit status -9 and without a word"),
        ("raise:1:9", r"(?s)^rank 1 failed:\nTraceback.*ValueError: boom"),
    ],
)
def test_a_failing_rank_ends_the_run(trouble, told, tmp_path, monkeypatch):
    """With its own error, not with the others' complaints that it is gone; nobody stays behind."""
    monkeypatch.setenv("TINY_TROUBLE", trouble)
    began = time.monotonic()
    with forked(), pytest.raises(RuntimeError, match=told):
        train.run(composed.run(tmp_path, "comm=gloo", "comm.processes=2", "epochs=200"))
    assert time.monotonic() - began < 30
    assert multiprocessing.active_children() == []
    folder = RunFolder(tiny.only(tmp_path))
    assert folder.read_json("summary.json")["reason"].startswith("rank 1 failed") and not folder.done


# ---- processes of another launcher


@pytest.mark.slow
def test_torchrun(tmp_path):
    """Only rank 0 writes and prints; one folder per run: the launcher's store outlives a run, and the second one must
    not find the first one's folder there. A single run is what `test_slurm_with_processes_of_their_own` starts."""
    typed = tiny.typed(tmp_path, "comm=auto", "epochs=1", "paths.data=nowhere", "seed=0,1")
    arguments = [*tiny.TORCHRUN, "-m", *typed]
    done = subprocess.run(arguments, cwd=HOUSE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    folders = sorted(path for path in tmp_path.iterdir() if (path / "config.yaml").exists())
    assert [RunFolder(path).read_config()["seed"] for path in folders] == [0, 1]
    assert all(RunFolder(path).done and len(RunFolder(path).read_metrics()) == 1 for path in folders)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line in map(str, folders)] == [str(path) for path in folders]
    assert lines[-1] == f"folders: {tmp_path / 'sweep.jsonl'}"
    assert len([line for line in lines if "4 workers (gloo, 2 processes x 2 on cpu)" in line]) == 2
    assert done.stderr.count("warning: paths.data has no effect") == 2


def task(rank: int, of_rank: list[dict[str, str]], words: list[str], said: Path) -> None:
    """The command as one task, in this process; what it says goes to a file."""
    os.environ.update(of_rank[rank])
    sys.argv = ["accordion_bench", *words]
    with (
        open(said / f"{rank}.out", "w") as out,
        open(said / f"{rank}.err", "w") as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        command.main()


def tasks_of_two() -> list[dict[str, str]]:
    """What srun says to each of two tasks, with an address to meet at and a secret."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), SECRET: "sixteen letters or more"}
    return [slurm(rank, 2, 2) | meet for rank in range(2)]


def check_slurm(runs: Path, outputs: list[tuple[str, str]]) -> None:
    """Only rank 0 speaks, and nothing that is written holds the secret."""
    assert outputs[0][0].splitlines()[-1] == str(tiny.only(runs))
    assert outputs[1] == ("", "")
    assert not any(b"sixteen letters" in file.read_bytes() for file in runs.rglob("*") if file.is_file())
    assert RunFolder(tiny.only(runs)).read_json("summary.json")["workers"] == 4


def test_slurm(tmp_path):
    """As srun starts them, but forked."""
    runs = tmp_path / "runs"
    together(2, task, tasks_of_two(), tiny.typed(runs, "comm=gloo"), tmp_path)
    check_slurm(runs, [tuple((tmp_path / f"{rank}.{end}").read_text() for end in ("out", "err")) for rank in (0, 1)])


@pytest.mark.slow
def test_slurm_with_processes_of_their_own(tmp_path):
    """As srun starts them."""
    tasks = []
    for of_rank in tasks_of_two():
        arguments = [*tiny.COMMAND, *tiny.typed(tmp_path, "comm=gloo")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        tasks.append(subprocess.Popen(arguments, cwd=HOUSE, env={**os.environ, **of_rank}, **pipes))
    outputs = [task.communicate(timeout=120) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs
    check_slurm(tmp_path, outputs)


# ---- several runs of one command


def multirun(monkeypatch, *overrides: str) -> int | str | None:
    """Exit status of `python -m accordion_bench -m ...`, in this process."""
    monkeypatch.setattr(sys, "argv", ["accordion_bench", "-m", *overrides])
    try:
        command.main()
    except SystemExit as end:
        return end.code
    return 0


def test_multirun_over_compressors(tmp_path, monkeypatch, capsys):
    """One of them has a momentum of its own. That all train is tested with every policy, in cli/test_pairwise.py."""
    compressors = ["demo", "none", "powersgd"]
    typed = tiny.typed(tmp_path, "epochs=1", "optimizer.momentum=0", "compressor=" + ",".join(compressors))
    assert multirun(monkeypatch, *typed) == 0
    folders = [RunFolder(path) for path in tiny.folders(tmp_path)]
    assert sorted(folder.read_config()["choices"]["compressor"] for folder in folders) == compressors
    assert all(folder.done and len(folder.read_metrics()) == 1 for folder in folders)
    printed = capsys.readouterr()
    (told,) = printed.err.splitlines()  # of DeMo, whose chunks of so small a model are dense
    assert told.startswith("warning: 5 of 9 tensors") and told.endswith("type a lower compressor.k")
    assert {str(folder.path) for folder in folders} <= set(printed.out.splitlines())


def test_a_failing_cell_leaves_the_others_alone(tmp_path, monkeypatch, capsys):
    typed = tiny.typed(tmp_path, "epochs=1", "batch_size=0,4,-1,8")
    assert multirun(monkeypatch, *typed) == 2
    assert sorted(RunFolder(path).read_config()["batch_size"] for path in tiny.folders(tmp_path)) == [4, 8]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 + 3  # the summary at the end has its own tests
    assert "batch_size=0" in told[0] and "batch_size must be an integer of at least 1, got 0; type" in told[0]
    assert "batch_size=-1" in told[1] and "batch_size must be an integer of at least 1, got -1; type" in told[1]


def test_folders_of_one_second_are_unique(tmp_path):
    folders = {RunFolder.create(str(tmp_path), "x", {}).path for _ in range(20)}
    assert len(folders) == 20
    environment = json.loads((Path(folders.pop()) / "environment.json").read_text())
    assert environment["versions"]["torch"] and environment["python"]
