"""Public names: each has an example in its docstring, and every example runs."""

import doctest
import importlib

import matplotlib
import pytest
import torch
import torch.distributed as dist

import accordion_bench as ab
from scripts.site import API
from tests.kit.processes import together
from tests.report.test_report import run_folder

NAMES = [name for names in API.values() for name in names]
PROCESSES = {"attach_shards": 2}  # that an example needs; else one


def run_example(name: str, known: dict[str, object]) -> None:
    """Run the examples in the docstring of a public name, which must have one.

    Args:
        name: module and name, with dots.
        known: names that the examples use without defining them.
    """
    module, _, own = name.rpartition(".")
    public = getattr(importlib.import_module(module), own)
    beside = vars(importlib.import_module(module)) | known
    found = [case for case in doctest.DocTestFinder(recurse=False).find(public, own, globs=beside) if case.examples]
    assert found
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for case in found:
        runner.run(case, out=said.append)
    assert not runner.failures, "".join(said)


def of_rank(rank: int, name: str, meeting: str, processes: int) -> None:
    store = dist.FileStore(meeting, processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    run_example(name, {"ab": ab, "torch": torch})
    dist.destroy_process_group()


@pytest.fixture
def known(tmp_path, monkeypatch):
    """One worker in its process group, and run folders of two arms."""
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    for arm in ("none", "powersgd"):
        run_folder(tmp_path / "runs", arm)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield {"ab": ab, "torch": torch, "runs": str(tmp_path / "runs")}
    dist.destroy_process_group()


@pytest.mark.parametrize("name", [name for name in NAMES if name.rpartition(".")[2] not in PROCESSES])
def test_an_example_runs(name, known):
    run_example(name, known)


@pytest.mark.parametrize("name", [name for name in NAMES if name.rpartition(".")[2] in PROCESSES])
def test_an_example_of_several_processes_runs(name, tmp_path):
    processes = PROCESSES[name.rpartition(".")[2]]
    together(processes, of_rank, name, str(tmp_path / "store"), processes)
