"""The scripts that measure on a GPU run to their end on recorders of torch.cuda, see tests/kit/no_driver.py."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accordion_bench.plan import TensorSpec
from scripts.bench import codec
from scripts.gpu import exchange, replay, report, sections
from scripts.gpu.sections import Setting
from tests import conftest
from tests.kit.no_driver import cuda
from tests.kit.paths import ROOT

SPECS = [TensorSpec("a", (32, 16, 3, 3)), TensorSpec("bias", (32,)), TensorSpec("head", (70, 90))]
NAMES = ["topk", "powersgd"]
NEXT = (ROOT / "scripts" / "gpu" / "next.sh").read_text()


@pytest.fixture
def typed(monkeypatch):
    """Return a function that calls `main` with arguments, on small tensors."""
    monkeypatch.setattr(codec, "shapes", lambda millions, flat: SPECS)
    monkeypatch.setattr(sections, "resnet50", lambda: SPECS)
    monkeypatch.setattr(exchange, "MILLIONS", (11,))

    def call(main, *arguments: str) -> int | None:
        monkeypatch.setattr(sys, "argv", ["x", *arguments])
        with cuda(interpreted=False):
            return main()

    return call


def test_a_report(tmp_path, typed):
    options = ["--rounds", "2", "--out", str(tmp_path), "--compressors", *NAMES]
    assert typed(report.main, "--only", "waits", "codecs", "memory", *options) == 0
    found = json.loads((tmp_path / "report.json").read_text())
    assert [row[:2] for row in found["waits"]["found"]] == [[name, "none"] for name in NAMES]
    times = {name for name in NAMES for name in (name, f"{name}, by torch")}
    assert {row[1] for row in found["codecs"]["found"]} == times | {"copy"}
    assert [row[0] for row in found["memory"]["found"]] == NAMES


def test_exchanges_eager_and_replayed(tmp_path, typed, capsys):
    options = ["--rounds", "2", "--out", str(tmp_path), "--compressors", "topk:chunk=64", "qsgd"]
    assert typed(replay.main, "--only", "exchange", *options) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 11 ")]
    assert [row[5] for row in rows] == ["the same"] * 2 and all(float(row[3]) > 0 for row in rows)


def test_exchanges_for_a_sanitizer(typed):
    with torch.no_grad():
        typed(sections.main, "topk,topk:chunk=64,adacomp", "0")


def test_programs_are_started_where_they_are_found(tmp_path, monkeypatch):
    folders: list[Path] = []

    def started(command: list[str], cwd: Path, **_: object) -> SimpleNamespace:
        folders.append(cwd)
        return SimpleNamespace(stdout="", stderr="", returncode=0)

    monkeypatch.setattr(subprocess, "run", started)
    for section in (sections.tests, sections.sanitizer):
        section(Setting("cuda", True, 2, 0, tmp_path, NAMES))
    assert all((cwd / "tests").is_dir() and (cwd / "scripts" / "gpu" / "sections.py").is_file() for cwd in folders)
    assert len(folders) == 2


def test_tests_of_kernels_see_the_gpu(monkeypatch):
    """Unless tests marked gpu are asked for, a GPU is hidden from tests, and Triton's interpreter runs the kernels."""
    (line,) = (line for line in NEXT.splitlines() if "pytest" in line)
    words = shlex.split(line)
    marks = words[words.index("-m", words.index("pytest")) + 1]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    conftest.pytest_configure(SimpleNamespace(option=SimpleNamespace(markexpr=marks)))
    assert conftest.os.environ.get("CUDA_VISIBLE_DEVICES") is None
