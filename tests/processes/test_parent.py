"""Whoever is started by a process of ours ends with it, also where it is killed and can tell nobody."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit import tiny
from tests.kit.paths import ROOT
from tests.kit.processes import group_members

SPAWNED = """
import multiprocessing, time
from accordion_bench.processes.interrupt import end_with_parent

def work():
    end_with_parent()
    print("started", flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    children = [multiprocessing.get_context(kind).Process(target=work) for kind in ("spawn", "fork")]
    [child.start() for child in children]
    time.sleep(1000)
"""
POOL = """
import time
from accordion_bench.report import parallel

def work(number):
    print("started", flush=True)
    time.sleep(1000)

parallel.MANY = 2
parallel.os.sched_getaffinity = lambda pid: {0, 1}
parallel.TOGETHER = 1
parallel.each(work, [1, 2], "working")
"""
JOBLIB = """
import os, time
from hydra_plugins.hydra_joblib_launcher import _core
from accordion_bench.cli import sweep

def work():
    print("started", flush=True)
    time.sleep(1000)

if __name__ == "__main__":
    sweep._let_workers_end_with(os.getpid())
    _core.Parallel(n_jobs=3, backend="loky")(_core.delayed(work)() for _ in range(2))
"""


def all_end_with(arguments: list[str], cwd: Path, began) -> None:
    """Start a process in a group of its own, kill it alone when it has begun; the others of the group end, too."""
    starter = subprocess.Popen(arguments, cwd=cwd, start_new_session=True, stdout=subprocess.PIPE, text=True)
    try:
        began(starter)
        assert len(group_members(starter.pid)) > 1
        starter.kill()
        starter.wait()
        until = time.monotonic() + 60
        while left := group_members(starter.pid):
            assert time.monotonic() < until, left
            time.sleep(0.1)
    finally:
        if group_members(starter.pid):
            os.killpg(starter.pid, signal.SIGKILL)
        starter.stdout.close()


@pytest.mark.parametrize("program", [SPAWNED, POOL, JOBLIB], ids=["multiprocessing", "report", "joblib"])
def test_all_end_with_whom_they_work_for(program, tmp_path, monkeypatch):
    """Of joblib's three workers one has nothing to do; each keeps the pipes of the others open."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "program.py").write_text(program)
    all_end_with(
        [sys.executable, "program.py"], tmp_path, lambda starter: [starter.stdout.readline() for _ in range(2)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_cells_of_a_sweep_end_with_its_launcher(launcher, tmp_path):
    """joblib's with the command; submitit's with the controller that each was submitted to, not with the command."""
    typed = tiny.typed(tmp_path, f"hydra/launcher={launcher}", "epochs=100000", "seed=0,1")
    typed += ["hydra.launcher.n_jobs=3"] if launcher == "joblib" else ["hydra.launcher.cpus_per_task=1"]

    def began(starter: subprocess.Popen) -> None:
        while len(list(tmp_path.glob("*/metrics.jsonl"))) < 2:
            assert starter.poll() is None
            time.sleep(0.1)
        if launcher == "submitit_local":
            for pid in group_members(starter.pid):
                if "submitit.local._local" in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)

    all_end_with([*tiny.COMMAND, "-m", *typed], ROOT, began)
