"""The examples of ab.attach and ab.local: each is short, learns, and leaves one model on all ranks."""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.kit.paths import ROOT
from tests.kit.processes import free_port, outputs, started, together
from tests.kit.run_example import run

FOLDER = ROOT / "examples" / "attach"
OWN_LOOPS = ["plain", "ddp", "local"]
FRAMEWORKS = {"with_lightning": "lightning", "with_accelerate": "accelerate", "with_hf_trainer": "transformers"}


def _ranked(rank: int, ports: list[int], folder: Path) -> None:
    """One of two processes, with the environment that torchrun gives, for one example after the other."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, port in zip(OWN_LOOPS, ports, strict=True):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        with open(folder / name / f"{rank}.txt", "w") as out, contextlib.redirect_stdout(out):
            run(FOLDER / f"{name}.py", folder / name)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of each loop of one's own after its end."""
    folder = tmp_path_factory.mktemp("examples")
    for name in OWN_LOOPS:
        (folder / name).mkdir()
    together(2, _ranked, [free_port() for _ in OWN_LOOPS], folder)
    return {name: folder / name for name in OWN_LOOPS}


def _launched(name: str, folder: Path, how: str = "") -> subprocess.CompletedProcess:
    """The command of the example's first line, with two processes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = ["-m", "tests.kit.run_example", str(FOLDER / f"{name}.py"), str(folder)]
    (ended,) = outputs([started([*torchrun, *script, *filter(None, [how])], dict(os.environ))], seconds=240)
    assert ended.returncode == 0, ended.stderr
    return ended


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """Those of both ranks, which are the same."""
    first, second = (torch.load(folder / f"{rank}.pt") for rank in (0, 1))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    return first


def _learned(said: str, compressor: str) -> None:
    """It says how the loss falls, and at its end what was sent."""
    losses = [float(loss) for loss in re.findall(r"loss'?:? '?([\d.]+)", said)]
    assert len(losses) >= 4 and losses[-1] < 0.85 * losses[0]
    assert f"compressor={compressor}" in said
    assert float(re.search(r"payload: .* per worker, ([\d.]+) times fewer", said)[1]) > 3


@pytest.mark.parametrize("name, compressor", [("plain", "powersgd"), ("ddp", "topk"), ("local", "qsgd")])
def test_a_loop_of_ones_own(ended, name, compressor):
    folder = ended[name]
    _learned((folder / "0.txt").read_text(), compressor)
    assert (folder / "1.txt").read_text() == ""
    _weights(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_LOOPS)
def test_torchrun_starts_it(tmp_path, name):
    said = _launched(name, tmp_path)
    assert "epoch 5: loss" in said.stdout
    _weights(tmp_path)


@pytest.mark.integrations
@pytest.mark.parametrize("name, package", FRAMEWORKS.items())
def test_a_framework(tmp_path, name, package):
    _there(package)
    _learned(_launched(name, tmp_path).stdout, "powersgd")
    _weights(tmp_path)


@pytest.mark.integrations
@pytest.mark.parametrize("name, package", FRAMEWORKS.items())
def test_an_exchange_without_compression_changes_nothing_in_a_framework(tmp_path, name, package):
    """Accumulated, clipped and in the framework's order of hooks: as with stock DistributedDataParallel."""
    _there(package)
    weights = []
    for how in ("dense", "bare"):
        (tmp_path / how).mkdir()
        _launched(name, tmp_path / how, how)
        weights.append(_weights(tmp_path / how))
    assert all(torch.equal(dense, weights[1][key]) for key, dense in weights[0].items())


def _there(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-integrations")


@pytest.mark.parametrize("name", [*OWN_LOOPS, *FRAMEWORKS])
def test_it_is_short_and_says_how_to_start_it(name):
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    assert len([line for line in lines if line]) < 40
    assert lines[0].endswith(f'torchrun --standalone --nproc-per-node 2 examples/attach/{name}.py"""')


def test_every_example_is_tested():
    assert {file.stem for file in FOLDER.glob("*.py")} == {*OWN_LOOPS, *FRAMEWORKS}
