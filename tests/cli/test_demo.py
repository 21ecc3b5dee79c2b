"""accordion-bench demo: what it types, what it prints, and what it leaves, from an empty folder."""

import io
import os
import subprocess
import sys
import threading
import time

import pytest

from accordion_bench.__main__ import in_order
from accordion_bench.cli import demo
from accordion_bench.config.compose import compose
from tests.kit import composed
from tests.kit.paths import ROOT


@pytest.mark.parametrize("seeds", ["0", "0,1,2"])
def test_its_arms_are_accepted(seeds):
    for words in demo.arms(40, seeds, "runs").values():
        assert ("-m" in words) == ("," in seeds)
        first = [word.split(",")[0] for word in words if "=" in word]
        composed.validated(compose([*in_order(first)]))


@pytest.mark.parametrize(("epochs", "interval"), [(6, 1), (40, 5)])
def test_a_short_demo_has_a_policy_that_looks_after_each_epoch(epochs, interval):
    words = demo.arms(epochs, "0", "runs")["Accordion"]
    assert f"adaptive.accordion.interval={interval}" in words and f"epochs={epochs}" in words


def stub(tmp_path, status: int) -> str:
    """An interpreter that says what was typed, makes the table where it is a report, and ends."""
    file = tmp_path / "python"
    file.write_text(f'#!/usr/bin/env bash\necho "ran $*"\nexit {status}\n', encoding="utf-8")
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize("status", [0, 3])
def test_lines_begin_with_their_arm_and_a_failure_is_the_commands(status, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(demo.sys, "executable", stub(tmp_path, status))
    monkeypatch.chdir(tmp_path)
    assert demo.main(["--epochs", "1", "--jobs", "2"]) == status
    said = capfd.readouterr().out.splitlines()
    for name in ("dense", "rank 4", "rank 1", "Accordion"):
        assert any(line.startswith(f"{name}: ran -m accordion_bench compressor=") for line in said)
    assert "4 of 4 arms are done" in " ".join(said)
    assert any(line.startswith("ran -m accordion_bench.report results/runs/demo/") for line in said) == (status == 0)


@pytest.mark.slow
def test_from_an_empty_folder(tmp_path):
    """With nothing of the checkout but the package."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "accordion_bench", "demo", "--epochs", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "results" / "report" / "comparison.png").is_file()
    assert len([*(tmp_path / "results" / "runs" / "demo").glob("*/*/done")]) == 4


def test_lines_of_arms_do_not_mix(monkeypatch):
    """print() writes a line and its end apart, and another thread may write between them."""

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            done = super().write(text)
            time.sleep(0.001)
            return done

    out = Slow()
    monkeypatch.setattr(sys, "stdout", out)
    threads = [threading.Thread(target=lambda: [demo._say("a whole line") for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert out.getvalue() == "a whole line\n" * 80
