"""A training outlives whoever reads what it prints; a terminal that closes ends it with a checkpoint."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.runs.folder import RunFolder
from tests.kit import tiny
from tests.kit.processes import group_members
from tests.kit.terminal import Terminal

HOUSE = conf_dir().parent
ENDLESS = ("epochs=100000", "schedule=constant")
TWO = ("comm=gloo", "comm.processes=2")
GONE, NO_ROOM = "Broken pipe", "No space left on device"


def shell(redirected: str, *words: str) -> subprocess.CompletedProcess:
    """Run a command by bash, its streams redirected; the status is that of the command, whatever reads it."""
    script = f'set -o pipefail; "$@" {redirected}'
    return subprocess.run(
        ["bash", "-c", script, "bash", *words], cwd=HOUSE, capture_output=True, text=True, timeout=200
    )


def check_ended(runs: Path, why: str = "", count: int = 1) -> None:
    """Each run has come to its end; run.log says which stream was lost, and has a line for each epoch."""
    folders = tiny.folders(runs)
    assert len(folders) == count and all(RunFolder(folder).done for folder in folders)
    for folder in folders:
        log = (folder / "run.log").read_text()
        assert log.count(
            f"standard output can no longer be written ({why}); the training in {folder} continues"
        ) == bool(why)
        assert log.count(" INFO epoch ") == len(RunFolder(folder).read_metrics()) >= 1


def cases(**redirected: str):
    """Of the ways to lose a stream the first is in the default suite."""
    return [
        pytest.param(text, id=name, marks=[pytest.mark.slow] * (i > 0))
        for i, (name, text) in enumerate(redirected.items())
    ]


@pytest.mark.parametrize(
    "redirected", cases(head="| head -n 1", closed=">&- 2>&-", full=">/dev/full", both=">/dev/full 2>&1")
)
def test_a_run(redirected, tmp_path):
    done = shell(redirected, *tiny.COMMAND, *tiny.typed(tmp_path, "epochs=3"))
    why = GONE if "head" in redirected else NO_ROOM if "full" in redirected else ""
    assert done.returncode == 0 and "Traceback" not in done.stderr
    check_ended(tmp_path, why)
    told = why and "2>&1" not in redirected
    assert done.stderr.count("warning: ") == bool(told)


@pytest.mark.slow
@pytest.mark.parametrize("redirected", ["| head -n 1", ">&- 2>&-", ">/dev/full 2>&1"])
def test_spawned_processes(redirected, tmp_path):
    done = shell(redirected, *tiny.COMMAND, *tiny.typed(tmp_path, "epochs=3", *TWO))
    assert done.returncode == 0 and "Traceback" not in done.stderr
    check_ended(tmp_path, GONE if "head" in redirected else NO_ROOM if "full" in redirected else "")


@pytest.mark.slow
@pytest.mark.parametrize("redirected", ["| head -n 1", ">/dev/full 2>&1"])
@pytest.mark.parametrize(
    "launcher", [(), ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")], ids=["basic", "joblib"]
)
def test_a_sweep(launcher, redirected, tmp_path):
    done = shell(redirected, *tiny.COMMAND, "-m", *tiny.typed(tmp_path, "seed=0,1", "epochs=1", *launcher))
    assert done.returncode == 0 and "Traceback" not in done.stderr
    check_ended(tmp_path, GONE if "head" in redirected else NO_ROOM, count=2)


@pytest.mark.slow
@pytest.mark.parametrize("redirected", ["| head -n 1", ">/dev/full 2>&1"])
def test_torchrun(redirected, tmp_path):
    done = shell(redirected, *tiny.TORCHRUN, *tiny.typed(tmp_path, "epochs=3", "comm=gloo"))
    assert done.returncode == 0 and "Traceback" not in done.stderr
    check_ended(tmp_path, GONE if "head" in redirected else NO_ROOM)


@pytest.mark.slow
@pytest.mark.parametrize("redirected, status", [("| true", 0), (">&- 2>&-", 0), (">/dev/full", 1)])
def test_advice_and_report(redirected, status, tmp_path):
    """Their files are whole; text that is wanted and cannot be written is a failure."""
    small = ["model=resnet8", "dataset=synthetic", "dataset.size=8", "batch_size=4", "workers=4", "network=1gbit"]
    advice = [
        tiny.COMMAND[0],
        "-m",
        "accordion_bench.advise",
        *small,
        "--methods",
        "bf16",
        "--out",
        str(tmp_path / "a"),
    ]
    done = shell(redirected, *advice)
    assert done.returncode == status and "Traceback" not in done.stderr
    assert "bf16" in (tmp_path / "a" / "advice.txt").read_text()
    shell("", *tiny.COMMAND, *tiny.typed(tmp_path / "runs", "epochs=1"))
    report = [tiny.COMMAND[0], "-m", "accordion_bench.report", str(tmp_path / "runs"), "--out", str(tmp_path / "r")]
    done = shell(redirected, *report)
    assert done.returncode == status and "Traceback" not in done.stderr
    assert (tmp_path / "r" / "table.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), TWO, ("seed=0,1",)], ids=["one", "two", "sweep"])
def test_a_terminal_that_closes(overrides, tmp_path):
    """The kernel sends SIGHUP, and refuses what is written from then on."""
    terminal = Terminal(80)
    sweep = ["-m"] if "seed=0,1" in overrides else []
    words = [*tiny.COMMAND, *sweep, *tiny.typed(tmp_path, *ENDLESS, *overrides)]
    # setsid --ctty: it is the terminal of that session, which ends with it
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.descriptor)
    job = subprocess.Popen(["setsid", "--ctty", *words], cwd=HOUSE, env={**os.environ, "TERM": "xterm"}, **streams)
    until = time.monotonic() + 100
    while "epoch 2 of" not in terminal.drawn:
        assert job.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    os.close(terminal.descriptor)
    os.close(terminal._other)
    assert job.wait(60) == 128 + signal.SIGHUP
    folder = tiny.only(tmp_path)
    summary = RunFolder(folder).read_json("summary.json")
    assert summary["stopped_by"] == "Interrupted" and "stopped after step" in summary["reason"]
    assert list(folder.glob("checkpoint/step-*"))
    assert group_members(job.pid) == []


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), TWO], ids=["one", "two"])
def test_nohup_goes_on(overrides, tmp_path):
    words = ["nohup", *tiny.COMMAND, *tiny.typed(tmp_path, "epochs=200", "schedule.milestones=[0.5]", *overrides)]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    job = subprocess.Popen(words, cwd=HOUSE, start_new_session=True, **streams)
    while not any(file.read_text() for file in tmp_path.glob("*/metrics.jsonl")):
        assert job.poll() is None
        time.sleep(0.1)
    os.killpg(job.pid, signal.SIGHUP)
    assert job.wait(100) == 0
    check_ended(tmp_path)
