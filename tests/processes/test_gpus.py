"""Which GPU is whose, and that no two processes have the same; uuids and names are made up."""

import pytest
import torch
import torch.distributed as dist

from accordion_bench.comm.sealed_store import SealedStore
from accordion_bench.options.checks import ConfigError
from accordion_bench.processes import machine
from tests.kit.stores import LocalStore


@pytest.mark.parametrize(
    "environ, identities",
    [
        ({}, ["GPU-1", "GPU-2"]),
        ({"CUDA_VISIBLE_DEVICES": "3,5"}, ["GPU-1", "GPU-2"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, ["GPU-1", "GPU-2"]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-a"}, ["GPU-1 MIG-a", "GPU-2"]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-GPU-1/7/0, MIG-b"}, ["GPU-1 MIG-GPU-1/7/0", "GPU-2 MIG-b"]),
    ],
)
def test_a_process_computes_on_a_gpu_or_on_the_part_that_it_sees(environ, identities):
    assert [machine.gpu_identity(f"GPU-{index + 1}", index, environ) for index in range(2)] == identities


def test_processes_with_gpus_of_their_own_pass():
    """--gpus-per-task=1: all say number 0; the uuids tell them apart, and the parts of one GPU have names."""
    store = SealedStore(LocalStore(), 4)
    for rank, mine in enumerate(["GPU-1", "GPU-2", "GPU-3 MIG-a", "GPU-3 MIG-b"]):
        machine.refuse_shared_gpu(store, rank, mine)
    machine.refuse_shared_gpu(store, 1, "GPU-2")  # asked again


@pytest.mark.parametrize("mine", ["GPU-1", "GPU-1 MIG-GPU-1/7/0"])
@pytest.mark.parametrize("kind", ["ours", "file", "tcp"])
def test_two_processes_on_one_gpu_are_told_in_one_sentence(mine, kind, tmp_path):
    """In the stores that runs really have, too: of spawned processes a file, else a server."""
    store = SealedStore(LocalStore(), 4)
    if kind == "file":
        store = SealedStore(dist.FileStore(str(tmp_path / "store"), 4), 4)
    if kind == "tcp":
        store = SealedStore(
            dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False), 4, "sixteen letters or more"
        )
    machine.refuse_shared_gpu(store, 0, mine)
    machine.refuse_shared_gpu(store, 1, "GPU-2")
    told = rf"^comm=nccl must have a GPU for each process, got {mine} for the ranks 0 and 2; type comm=gloo .*$"
    with pytest.raises(ConfigError, match=told):
        machine.refuse_shared_gpu(store, 2, mine)


def test_gpus_of_several_kinds_are_told_in_one_sentence():
    assert machine.mixed_gpu_warning(["H200"] * 8) == machine.mixed_gpu_warning(["H200"]) == ""
    told = machine.mixed_gpu_warning(["H200"] * 4 + ["A100"] * 2 + ["V100"])
    assert told.startswith("this run has GPUs of 3 kinds: H200 (ranks 0-3), A100 (ranks 4-5), V100 (rank 6); ")
    assert "H200 (ranks 0, 2, 4 ...), A100 (ranks 1, 3, 5 ...)" in machine.mixed_gpu_warning(["H200", "A100"] * 8)


def test_only_one_room_of_the_processes_asks_cuda():
    """So that a test, or a machine without GPUs, has one place to answer for."""
    from accordion_bench.options.conf_dir import package_dir

    asking = {
        file.name
        for folder in ("processes", "config", "training/launch.py", "train.py")
        for file in ([package_dir() / folder] if folder.endswith(".py") else (package_dir() / folder).glob("*.py"))
        if "torch.cuda" in file.read_text(encoding="utf-8")
    }
    assert asking == {"machine.py"}


def test_what_is_asked_of_cuda_exists():
    """The names that a machine with a GPU will call; that they answer is shown by the suite for GPUs."""
    for name in ("device_count", "set_device", "get_device_properties", "get_device_name"):
        assert callable(getattr(torch.cuda, name))
    assert hasattr(torch._C._CudaDeviceProperties, "uuid") or not hasattr(torch._C, "_CudaDeviceProperties")
