"""Public names: each has an example in its docstring, and every example runs."""

import doctest
import importlib

import matplotlib
import pytest
import torch
import torch.distributed as dist

import accordion_bench as ab
from scripts.site import API
from tests.report.test_report import run_folder

NAMES = [name for names in API.values() for name in names]
WITHOUT = {"attach_shards"}  # needs two processes; tests/attaching has it


@pytest.fixture
def known(tmp_path, monkeypatch):
    """What the examples take for granted: one worker in its process group, and run folders."""
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    for arm in ("none", "powersgd"):
        run_folder(tmp_path / "runs", arm)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield {"ab": ab, "torch": torch, "runs": str(tmp_path / "runs")}
    dist.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs(name, known):
    module, _, own = name.rpartition(".")
    public = getattr(importlib.import_module(module), own)
    beside = vars(importlib.import_module(module)) | known
    found = [case for case in doctest.DocTestFinder(recurse=False).find(public, own, globs=beside) if case.examples]
    assert found or own in WITHOUT
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for case in found:
        runner.run(case, out=said.append)
    assert not runner.failures, "".join(said)
