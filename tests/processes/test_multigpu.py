"""One process per GPU over NCCL: equal to the same workers in one process; failures end the run. Needs two GPUs."""

import os
import time

import pytest
import torch

from accordion_bench import train
from accordion_bench.processes.watchdog import RankFailed
from accordion_bench.runs.folder import RunFolder
from tests.kit import processes, tiny

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA devices, this machine has {GPUS}"),
]
NCCL = ["comm=nccl", "comm.processes=2", "comm.workers_per_process=1", "workers=2"]
FLOAT32 = 1e-3  # relative; other orders of summation, and kernels that differ from run to run, over 24 steps


@pytest.fixture(autouse=True)
def plain_float32(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of spawned processes
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")


def trained(runs, *overrides: str) -> dict:
    """summary.json of a tiny run."""
    train.run(tiny.cfg(runs, "device=cuda", *overrides))
    return RunFolder(tiny.only(runs)).read_json("summary.json")


# dense, low rank, sparse, one bit; the last two decide by thresholds and signs, so that a rounding error may turn one
METHODS = {
    "dense": (["compressor=none"], FLOAT32),
    "powersgd": (["compressor=powersgd", "compressor.rank=2"], FLOAT32),
    "topk": (["compressor=topk", "compressor.density=0.1"], 2e-2),
    "onebit": (["compressor=onebit"], 2e-2),
}


@pytest.mark.parametrize("method", METHODS)
def test_nccl_is_one_process(method, tmp_path):
    """The same bytes, and the same loss up to rounding, as both workers in one process and over gloo."""
    overrides, tolerance = METHODS[method]
    over_nccl = trained(tmp_path / "nccl", *NCCL, *overrides)
    simulated = trained(tmp_path / "one", "comm=simulated", "workers=2", *overrides)
    over_gloo = trained(tmp_path / "gloo", *NCCL, "comm=gloo", *overrides)
    for other in (simulated, over_gloo):
        for account in ("payload_bytes", "wire_bytes", "rounds", "dense_bytes"):
            assert over_nccl[account] == other[account]
        assert over_nccl["train_loss"] == pytest.approx(other["train_loss"], rel=tolerance)


@pytest.mark.parametrize("method", METHODS)
def test_overlap_changes_nothing(method, tmp_path):
    overrides, tolerance = METHODS[method]
    on, off = (trained(tmp_path / flag, *NCCL, *overrides, f"comm.overlap={flag}") for flag in ("true", "false"))
    assert on["train_loss"] == pytest.approx(off["train_loss"], rel=tolerance)
    assert on["payload_bytes"] == off["payload_bytes"]


def test_a_failing_rank_ends_the_run(tmp_path, monkeypatch):
    """The other one waits inside a collective of NCCL, where no exception reaches it."""
    monkeypatch.setenv("FAULT", "backward:1:9")
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)^rank 1 failed:\nTraceback.*boom in backward"):
        trained(tmp_path, *NCCL, "epochs=100000", "model._target_=tests.kit.faulty.Net")
    assert time.monotonic() - start < 60  # with the start of CUDA


@pytest.mark.parametrize("fault", ["backward:1:9", "kill:1:9"])
def test_a_failing_rank_ends_the_run_of_torchrun(fault, tmp_path, monkeypatch):
    monkeypatch.setenv("FAULT", fault)
    options = ["comm=nccl", "epochs=100000", "model._target_=tests.kit.faulty.Net"]
    job = processes.started([*tiny.TORCHRUN, *tiny.typed(tmp_path, *options)], dict(os.environ))
    (done,) = processes.outputs([job], 90)
    assert done.returncode != 0 and "rank 1 failed:" in done.stderr
    assert RunFolder(tiny.only(tmp_path)).read_json("summary.json")["reason"].startswith("rank 1 failed:")


def test_a_rank_that_hangs_is_told_in_our_sentence(tmp_path, monkeypatch):
    """Not by an abort of the processes that wait inside NCCL."""
    monkeypatch.setenv("FAULT", "hang:1:9")
    with pytest.raises(RankFailed, match=r"has waited for another process for comm.timeout=10 s"):
        trained(tmp_path, *NCCL, "comm.timeout=10", "epochs=100000", "model._target_=tests.kit.faulty.Net")


@pytest.mark.parametrize("comm", ["nccl", "auto"])
def test_processes_that_share_a_gpu_are_told(comm, tmp_path, monkeypatch):
    """Each sees one GPU, and it is the same one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    job = processes.started([*tiny.TORCHRUN, *tiny.typed(tmp_path, f"comm={comm}")], dict(os.environ))
    (done,) = processes.outputs([job], 120)
    assert done.returncode != 0 and "comm=nccl must have a GPU for each process, got " in done.stderr


def test_processes_that_see_a_gpu_of_their_own_each(tmp_path):
    """As srun --gpus-per-task=1 starts them."""
    jobs, port = [], str(processes.free_port())
    for rank in range(2):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ = {**os.environ, **own, "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": str(rank)}
        jobs.append(processes.started([*tiny.COMMAND, *tiny.typed(tmp_path, "comm=auto", "epochs=1")], environ))
    assert [done.returncode for done in processes.outputs(jobs, 120)] == [0, 0]
    assert RunFolder(tiny.only(tmp_path)).read_json("summary.json")["comm_seconds"] is not None


@pytest.mark.parametrize("method", METHODS)
def test_deterministic_runs_repeat_themselves(method, tmp_path):
    overrides, _ = METHODS[method]
    runs = [trained(tmp_path / str(i), *NCCL, *overrides, "deterministic=true") for i in range(2)]
    assert runs[0]["train_loss"] == runs[1]["train_loss"]


def test_nccl_is_the_default_with_two_gpus(tmp_path):
    train.run(tiny.cfg(tmp_path, "comm=auto", "epochs=1"))
    folder = RunFolder(tiny.only(tmp_path))
    assert folder.done and folder.read_json("summary.json")["comm_seconds"] is not None
