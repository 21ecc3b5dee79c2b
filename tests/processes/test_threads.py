"""Threads: how many are chosen, that they sleep while they wait, and what a run says of them."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from accordion_bench import train
from accordion_bench.config import continuation
from accordion_bench.options.checks import ConfigError
from accordion_bench.processes import environment
from accordion_bench.report.compare.arms import Arm
from accordion_bench.report.read import Run
from accordion_bench.report.render.captions import unequal
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed, tiny

SMALL, LARGE = environment.WORTH_SHARING / 2, environment.WORTH_SHARING


@pytest.mark.parametrize(
    ("asked", "processes", "work", "environ", "chosen"),
    [
        (None, 1, LARGE, {}, 8),
        (None, 2, LARGE, {}, 4),
        (None, 3, LARGE, {}, 2),
        (None, 16, LARGE, {}, 1),
        (None, 1, SMALL, {}, 1),
        (None, 1, SMALL, {"OMP_NUM_THREADS": "3"}, 3),
        (None, 1, LARGE, {"OMP_NUM_THREADS": "2,1"}, 2),
        (None, 1, LARGE, {"OMP_NUM_THREADS": "many"}, 8),
        (5, 4, SMALL, {"OMP_NUM_THREADS": "3"}, 5),
    ],
)
def test_choose(monkeypatch, asked, processes, work, environ, chosen):
    monkeypatch.setattr(environment, "cores", lambda: 8)
    assert environment.choose_threads(asked, processes, lambda: work, environ) == chosen


def test_work_is_asked_only_where_it_decides(monkeypatch):
    def work():
        raise AssertionError

    monkeypatch.setattr(environment, "cores", lambda: 2)
    for asked, processes, environ in ((1, 1, {}), (None, 2, {}), (None, 1, {"OMP_NUM_THREADS": "1"})):
        environment.choose_threads(asked, processes, work, environ)


def test_waiting_threads_sleep_unless_the_user_says_otherwise():
    ours: dict[str, str] = {}
    environment.sleep_while_waiting(ours)
    theirs = {"OMP_WAIT_POLICY": "ACTIVE"}
    environment.sleep_while_waiting(theirs)
    assert (ours, theirs) == ({"OMP_WAIT_POLICY": "PASSIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"})


def test_the_command_line_says_so_before_torch_is_imported():
    """OpenMP reads it once, when torch is loaded: nothing that the command imports first may load torch."""
    lines = Path(train.__file__).with_name("__main__.py").read_text().partition("def main")
    assert "sleep_while_waiting()" in lines[2].partition("HYDRA_FULL_ERROR")[0]
    assert "torch" not in "".join(line for line in lines[0].splitlines() if "import" in line)


def test_a_run_says_with_how_many_and_goes_on_with_them(tmp_path):
    train.run(composed.run(tmp_path, "threads=1", "epochs=1", "checkpoint.every=6"))
    folder = RunFolder(tiny.only(tmp_path))
    seen = folder.read_json("environment.json")
    assert seen["threads"] == 1 and seen["load"] >= 0 and seen["host"] == os.uname().nodename
    (folder.path / "done").unlink()
    folder.write_json("environment.json", {**seen, "threads": 7})
    resume = f"resume={folder.path}"
    assert train.resumed_config(composed.run(tmp_path, resume), {"resume"})["threads"] == 1  # as its checkpoint says
    shutil.rmtree(folder.path / "checkpoint")
    assert train.resumed_config(composed.run(tmp_path, resume), {"resume"})["threads"] == 7
    assert train.resumed_config(composed.run(tmp_path, resume, "threads=2"), {"resume", "threads"})["threads"] == 2
    (folder.path / "environment.json").unlink()
    assert train.resumed_config(composed.run(tmp_path, resume), {"resume"})["threads"] is None


def test_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^threads must be an integer of at least 1, got 0; type threads=1$"):
        composed.validated(composed.run(tmp_path, "threads=0"))


@pytest.mark.parametrize("many", [10**5, 10**9, 10**30])
def test_more_than_a_machine_can_start_are_refused(many, tmp_path):
    """OpenMP would end the process. So it is wherever the number comes from."""
    rule = f"must be an integer of at most {16 * os.cpu_count()}, got {many}; type"
    with pytest.raises(ConfigError, match=f"^threads {rule} threads={environment.cores()}$"):
        composed.validated(composed.run(tmp_path, f"threads={many}"))
    with pytest.raises(ConfigError, match=f"^OMP_NUM_THREADS {rule}"):
        environment.choose_threads(None, 1, lambda: 1.0, {"OMP_NUM_THREADS": str(many)})
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_json("environment.json", {"threads": many})
    with pytest.raises(ConfigError, match=f"^threads {rule}"):
        continuation.threads_of(folder)


def arm(label: str, **environment) -> Arm:
    return Arm(label, (Run(Path(label), {"seed": 0}, {"cpu_cores": 4, **environment}),))


def test_the_report_warns_of_unequal_circumstances():
    alike = arm("dense", threads=2, load=0.5), arm("topk", threads=2, load=2.4)
    assert unequal(alike) == []
    assert unequal([alike[0], arm("topk", threads=1, load=0.5)]) == [
        "The arms differ in threads per process (dense 2 and topk 1): so do their times."
    ]
    assert unequal([alike[0], replace(alike[1], runs=arm("topk", threads=2, load=4.5).runs)]) == [
        "Other work ran beside some arms (mean load at the start from 0.5, dense, to 4.5, topk, on 4 cores): "
        "their times are too long."
    ]
    assert unequal([arm("an old one"), arm("another")]) == []
    assert unequal([arm("an old one"), arm("topk", threads=2)]) == [
        "With how many threads per process an old one computed is not known: the times may differ by that."
    ]
    assert unequal([arm("an old one"), arm("topk", threads=2), arm("dense", threads=1)]) == [
        "The arms differ in threads per process (an old one unknown, topk 2 and dense 1): so do their times."
    ]
