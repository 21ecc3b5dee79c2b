"""Sweeps: every cell is recorded, whichever process runs it; what is done is not done again."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import joblib
import pytest
import torch

from accordion_bench import __main__ as command
from accordion_bench import locks, train
from accordion_bench.cli import sweep
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.processes import placement
from accordion_bench.report.read import find_runs
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import reuse
from accordion_bench.runs.folder import RunFolder
from tests.kit import tiny
from tests.kit.processes import group_members
from tests.runs.test_resume import differences, state

HOUSE = conf_dir().parent
PRESET = """# @package _global_
setup:
  experiment: pair
epochs: ${by_scale:60,4,1}
hydra:
  mode: MULTIRUN
  sweeper:
    params:
      compressor: none,topk
"""
HOLDER = """import sys, time
from accordion_bench.runs import reuse
from accordion_bench.runs.folder import RunFolder
held = reuse.hold(RunFolder(sys.argv[1]))
held.__enter__()
print(flush=True)
time.sleep(float(sys.argv[2]))
"""


class Net(tiny.Net):
    """Tells how many threads it is given."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__(in_channels, num_classes)
        Path(os.environ["NET_THREADS"], str(os.getpid())).write_text(str(torch.get_num_threads()))


def main(monkeypatch, *arguments: str) -> int | str | None:
    """Exit status of the command, in this process."""
    monkeypatch.setattr(sys, "argv", ["accordion_bench", *arguments])
    try:
        command.main()
    except SystemExit as end:
        return end.code
    return 0


def record(runs: Path) -> list[dict]:
    return [json.loads(line) for line in (runs / sweep.FILE).read_text().splitlines()]


def statuses(runs: Path) -> list[str]:
    return [line["status"] for line in record(runs)]


# ---- the record


def test_every_cell_is_recorded(tmp_path, monkeypatch, capsys):
    """Done, refused, diverged; the sweep goes on, its exit status is the worst, and the failed cells end it."""
    swept = ["batch_size=0,4", "optimizer.lr=1e30,0.02"]
    typed = tiny.typed(tmp_path, "epochs=1", "schedule.warmup_epochs=0", *swept)
    assert main(monkeypatch, "-m", *typed) == 2
    lines = record(tmp_path)
    assert [line["status"] for line in lines] == ["refused", "refused", "failed", "done"]
    assert [line["exit_status"] for line in lines] == [2, 2, 2, 0]
    assert len({line["sweep"] for line in lines}) == 1
    folders = [line["folder"] for line in lines]
    assert folders[:2] == [None, None] and sorted(folders[2:]) == list(map(str, tiny.folders(tmp_path)))
    assert [line["metric"] for line in lines[:3]] == [None] * 3
    assert lines[3]["metric"] == RunFolder(folders[3]).read_json("summary.json")["metric"]
    assert lines[0]["error"].startswith("batch_size must be an integer of at least 1, got 0; type")
    assert "not finite" in lines[2]["error"] and "error" not in lines[3]
    assert all(line["seconds"] >= 0 and line["started"][:2] == "20" for line in lines)
    assert {"batch_size=4", "optimizer.lr=0.02"} <= set(lines[3]["overrides"])

    *_, heading, first, second, third, hint = capsys.readouterr().err.splitlines()
    assert heading == f"3 of 4 cells did not come to their end ({tmp_path / sweep.FILE}):"
    assert first.startswith("  refused: batch_size=0 optimizer.lr=1e+30: batch_size must be an integer")
    assert second.startswith("  refused: batch_size=0 optimizer.lr=0.02: batch_size must be an integer")
    assert third.startswith("  failed: batch_size=4 optimizer.lr=1e+30: step ")
    assert hint == "type the same command with resume_sweep=true to run what is missing"
    assert find_runs([tmp_path]) == tiny.folders(tmp_path)


def test_a_fault_is_recorded_by_its_last_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TINY_TROUBLE", "raise:0:9")
    assert main(monkeypatch, "-m", *tiny.typed(tmp_path, "seed=0,1")) == 1
    assert [(line["status"], line["error"]) for line in record(tmp_path)] == [("failed", "ValueError: boom")] * 2
    assert capsys.readouterr().err.count("Traceback") == 2


def test_single_runs_are_not_recorded(tmp_path, monkeypatch):
    assert main(monkeypatch, *tiny.typed(tmp_path, "epochs=1")) == 0
    assert main(monkeypatch, *tiny.typed(tmp_path, "epochs=0")) == 2
    assert not (tmp_path / sweep.FILE).exists()


def test_a_sweep_that_a_preset_asks_for(tmp_path, monkeypatch, capsys):
    """Without -m; each sweep reads only its own lines."""
    file = tmp_path / "conf" / "experiment" / "pair.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(PRESET)
    preset = ["--config-dir", str(tmp_path / "conf"), "+experiment=pair", "scale=tiny"]
    runs = tmp_path / "runs"
    typed = [item for item in tiny.typed(runs, "resume_sweep=true") if not item.startswith("epochs")]
    wrong = [item.replace("batch_size=4", "batch_size=0") for item in typed]
    assert main(monkeypatch, *preset, *wrong) == 2
    assert capsys.readouterr().err.endswith("got 0; type batch_size=32 (nothing has been run)\n")
    wrong = [item.replace("batch_size=4", "batch_size=999999") for item in typed]  # which a cell alone can tell
    assert main(monkeypatch, *preset, *wrong) == 2
    assert "2 of 2 cells did not" in capsys.readouterr().err
    assert main(monkeypatch, *preset, *typed) == 0
    assert main(monkeypatch, *preset, *typed) == 0
    assert statuses(runs) == ["refused"] * 2 + ["done"] * 2 + ["skipped"] * 2
    assert "cells" not in capsys.readouterr().err
    assert [RunFolder(path).read_config()["epochs"] for path in tiny.folders(runs)] == [1, 1]


def test_a_record_that_cannot_be_written_costs_no_run(tmp_path, monkeypatch, capsys):
    (tmp_path / sweep.FILE).mkdir()
    assert main(monkeypatch, "-m", *tiny.typed(tmp_path, "epochs=1", "seed=0,1")) == 0
    assert "warning: the record of the sweep cannot be written" in capsys.readouterr().err
    assert all(RunFolder(path).done for path in find_runs([tmp_path]))


def test_torn_lines_are_left_out(tmp_path):
    mine = sweep.Sweep()
    mine.file, mine.name = tmp_path / sweep.FILE, "mine"
    mine.append({"overrides": ["seed=0"], "status": "interrupted"})
    (tmp_path / sweep.FILE).write_text((tmp_path / sweep.FILE).read_text() + '{"sweep": "ot\n')
    other = sweep.Sweep()
    other.file, other.name = mine.file, "other"
    other.append({"overrides": ["seed=0"], "status": "failed"})
    mine.append({"overrides": ["seed=0"], "status": "done"})  # the cell was started anew
    assert [line["status"] for line in mine.lines()] == ["done"]


# ---- done cells are skipped


def test_done_cells_are_skipped(tmp_path, monkeypatch, capsys):
    typed = tiny.typed(tmp_path, "epochs=1", "resume_sweep=true")
    assert main(monkeypatch, "-m", *typed, "compressor=none,topk") == 0
    first = tiny.folders(tmp_path)
    metrics = [line["metric"] for line in record(tmp_path)]
    capsys.readouterr()
    # another tracker, other checkpoints: no other result
    others = tiny.typed(tmp_path, "epochs=1", "resume_sweep=true", "compressor=none,topk,randomk", "checkpoint.every=5")
    assert main(monkeypatch, "-m", *others) == 0
    assert statuses(tmp_path)[2:] == ["skipped", "skipped", "done"]
    assert [line["metric"] for line in record(tmp_path)[2:4]] == metrics
    assert [line["folder"] for line in record(tmp_path)[2:4]] == [str(path) for path in first]
    assert len(tiny.folders(tmp_path)) == 3
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == [*(f"done already: {path}" for path in first), "3 of 3: compressor=randomk"]
    assert [row.split()[-1] for row in printed[-4:-1]] == [f"compressor={name}" for name in ("none", "topk", "randomk")]
    assert train.run(tiny.cfg(tmp_path, "epochs=1", "resume_sweep=true")) == metrics[0]  # a single run, too


def test_a_stopped_sweep_goes_on(tmp_path, monkeypatch, capsys):
    """Ctrl-C: the record names the cell; the same command goes on with it, bit for bit, and then with the others."""
    typed = ["-m", *tiny.typed(tmp_path / "runs", "compressor=topk", "seed=0,1", "checkpoint.every=24")]
    monkeypatch.setenv("TINY_TROUBLE", f"stop:0:{4 * 9}")
    assert main(monkeypatch, *typed) == 130
    (folder,) = tiny.folders(tmp_path / "runs")
    (line,) = record(tmp_path / "runs")
    assert (line["status"], line["exit_status"], line["folder"]) == ("interrupted", 130, str(folder))
    assert line["error"].startswith("stopped after step 9; continue with: python -m accordion_bench ")
    assert line["error"].endswith(f" resume={folder} model._target_=tests.kit.tiny.Net")
    assert "resume_sweep=true" in capsys.readouterr().err
    monkeypatch.delenv("TINY_TROUBLE")

    assert main(monkeypatch, *typed, "resume_sweep=true") == 0
    assert f"going on with {folder}" in capsys.readouterr().out
    assert statuses(tmp_path / "runs")[1:] == ["done", "done"]
    assert record(tmp_path / "runs")[1]["folder"] == str(folder)
    assert len(tiny.folders(tmp_path / "runs")) == 2
    train.run(tiny.cfg(tmp_path / "straight", "compressor=topk", "checkpoint.every=24"))
    assert differences(state(folder), state(tiny.only(tmp_path / "straight"))) == []


def folder_like(cfg: dict, done: bool = True, checkpoint: bool = False) -> RunFolder:
    """A run folder without a run."""
    folder = RunFolder.create(cfg["paths"]["runs"], f"x-s{cfg['seed']}", cfg)
    if done:
        folder.finish({"metric": 0.5})
    if checkpoint:
        (folder.path / "checkpoint" / "step-00000003").mkdir(parents=True)
    time.sleep(0.001)
    return folder


@pytest.fixture
def cfg(tmp_path, monkeypatch):
    counter = iter(range(10**6))
    monkeypatch.setattr(
        "accordion_bench.runs.folder.time.strftime", lambda *_: f"{next(counter):08d}"
    )  # later, larger names
    return {**tiny.cfg(tmp_path / "runs", "compressor=topk"), "workers": 4}


def found(cfg: dict) -> Path | None:
    folder = reuse.find_earlier(cfg)
    return folder.path if folder else None


def test_nothing_is_found_where_nothing_is(cfg):
    assert found(cfg) is None
    folder_like(cfg, done=False)
    assert found(cfg) is None  # neither done nor a checkpoint


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 1},
        {"epochs": 3},
        {"batch_size": 8},
        {"workers": 2},
        {"device": "cpu"},
        {"target": 0.5},
        {"compressor": {"_target_": "x"}},
        {"measure": {"norms": True, "error": False}},
    ],
)
def test_other_configurations_are_other_runs(cfg, other):
    folder_like({**cfg, **other})
    assert found(cfg) is None
    mine = folder_like(cfg)
    folder_like({**cfg, **other})
    assert found(cfg) == mine.path


def test_what_decides_no_result_may_differ(cfg, tmp_path):
    """Keys that are free, names of choices, and options that runs of older versions lack."""
    older = {key: value for key, value in cfg.items() if key not in ("resume_sweep", "scale", "clip_norm", "target")}
    free = {"tracker": {"_target_": "x"}, "checkpoint": {"every": 7}, "choices": {}, "resume": "somewhere"}
    folder = folder_like({**older, **free})
    assert found({**cfg, "resume_sweep": True}) == folder.path


def test_a_run_with_another_label_is_found_and_renamed(tmp_path, monkeypatch, capsys):
    """It is trained once; a label that is typed is what reports call it from then on, and nothing else changes."""
    typed = tiny.typed(tmp_path, "epochs=1", "resume_sweep=true")
    assert main(monkeypatch, *typed, "label=a, first") == 0
    folder = RunFolder(tiny.only(tmp_path))
    before = {file.name: file.read_bytes() for file in folder.path.iterdir() if file.is_file()}
    saved = folder.read_config()
    assert saved["label"] == "a, first" and reuse.decisive(saved) == reuse.decisive({**saved, "label": None})
    assert main(monkeypatch, *typed) == 0  # nothing is typed: the label stays
    assert folder.read_config() == saved
    assert main(monkeypatch, *typed, "label=second") == 0
    assert capsys.readouterr().out.count(f"done already: {folder.path}") == 2
    assert tiny.only(tmp_path) == folder.path and folder.done
    assert folder.read_config() == {**saved, "label": "second"}
    after = {file.name: file.read_bytes() for file in folder.path.iterdir() if file.is_file()}
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == {"config.yaml"}
    assert main(monkeypatch, *typed, "label=null") == 0
    assert folder.read_config()["label"] is None


def test_a_run_that_goes_on_takes_the_label_that_is_typed(tmp_path, monkeypatch):
    typed = tiny.typed(tmp_path, "checkpoint.every=6", "label=first")
    monkeypatch.setenv("TINY_TROUBLE", "stop:0:9")
    assert main(monkeypatch, *typed) == 130
    monkeypatch.delenv("TINY_TROUBLE")
    folder = RunFolder(tiny.only(tmp_path))
    assert main(monkeypatch, f"resume={folder.path}", "model._target_=tests.kit.tiny.Net", "label=second") == 0
    assert folder.done and folder.read_config()["label"] == "second"


def test_the_newest_done_run_counts_then_the_newest_unfinished_one(cfg):
    stopped = [folder_like(cfg, done=False, checkpoint=True) for _ in range(2)]
    assert found(cfg) == stopped[1].path
    done = [folder_like(cfg) for _ in range(2)]
    folder_like(cfg, done=False, checkpoint=True)
    assert found(cfg) == done[1].path
    (done[1].path / "config.yaml").write_text("seed: 0\nepochs: 4\nbatch_size: 4\ntorn: {")
    assert found(cfg) == done[0].path


@contextlib.contextmanager
def running(folder: RunFolder, seconds: float):
    """Another process holds the folder for so long."""
    arguments = [sys.executable, "-c", HOLDER, str(folder.path), str(seconds)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline()
        yield
        holder.kill()  # whatever ends it, the folder is free then


def test_a_run_that_another_process_is_running_is_left_alone(cfg):
    folder = folder_like(cfg, done=False, checkpoint=True)
    told = "resume must be a run that no process is running, got .*; wait for its end"
    with running(folder, 100):
        for refused in (
            lambda: train.run({**cfg, "resume": str(folder.path)}),
            lambda: reuse.find_earlier(cfg, wait=False),
        ):
            with pytest.raises(ConfigError, match=told):
                refused()
        assert not (folder.path / "summary.json").exists()
        done = folder_like(cfg)
        assert found(cfg) == done.path
        (done.path / "done").unlink()
    assert found(cfg) == folder.path


def test_a_run_that_another_process_is_running_is_waited_for(cfg, capsys):
    """Until it is done, or can be continued."""
    folder = folder_like(cfg, done=False)
    with running(folder, 0.5):
        assert found(cfg) is None
    assert capsys.readouterr().out == f"waiting for the process that is running {folder.path}\n"
    checkpoint = folder_like(cfg, done=False, checkpoint=True)
    with running(checkpoint, 0.5):
        assert found(cfg) == checkpoint.path


def test_a_folder_that_cannot_be_locked(cfg, monkeypatch):
    """One that cannot be written, or is on a file system without locks: it is read as any other."""

    def refused(self):
        raise PermissionError(13, "Permission denied")

    folder = folder_like(cfg, done=False, checkpoint=True)
    monkeypatch.setattr(locks.FileLock, "acquire", refused)
    assert found(cfg) == folder.path
    assert not (folder.path / reuse.LOCK).exists()


# ---- other launchers


def run_cells(runs: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, **environ}
    arguments = (*tiny.COMMAND, "-m", *tiny.typed(runs, *arguments))
    return subprocess.run(arguments, cwd=HOUSE, env=environment, capture_output=True, text=True, timeout=200)


def test_a_sweep_without_a_list_says_that_it_is_one_cell(tmp_path, monkeypatch, capsys):
    """Wherever -m stands."""
    for number, (where, swept) in enumerate([(0, "seed=0"), (3, "seed=0"), (0, "seed=0,1")]):
        words = tiny.typed(tmp_path / str(number), "epochs=1", swept)
        assert main(monkeypatch, *words[:where], "-m", *words[where:]) == 0
        told = capsys.readouterr().err.count("note: -m found no list of values, and runs one cell; type -m ")
        assert told == (swept == "seed=0")
        assert len(tiny.folders(tmp_path / str(number))) == (1 if told else 2)


@pytest.mark.slow
def test_joblib(tmp_path):
    """Two workers: cells are recorded, a failed one leaves the others alone, threads are shared out."""
    threads = tmp_path / "threads"
    threads.mkdir()
    environ = {"NET_THREADS": str(threads), "OMP_NUM_THREADS": ""}
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    cells = [
        "compressor=none,topk",
        "batch_size=4,0",
        "epochs=${by_scale:1,2,3}",
        "model._target_=tests.cli.test_sweep.Net",
    ]
    done = run_cells(tmp_path / "runs", *launcher, *cells, **environ)
    assert done.returncode == 2, done.stderr
    lines = record(tmp_path / "runs")
    assert sorted(line["status"] for line in lines) == ["done", "done", "refused", "refused"]
    folders = {line["folder"] for line in lines} - {None}
    told = {line.partition(" | ")[2] for line in done.stdout.splitlines()}
    assert folders == {str(path) for path in tiny.folders(tmp_path / "runs")} <= told
    swept = [f"batch_size={size} compressor={name}" for size in (4, 0) for name in ("none", "topk")]
    own = [f"{number} of 4 {words} | " for number, words in enumerate(swept, 1)]
    *lines_of_cells, title, first, second, third, fourth, where = done.stdout.splitlines()
    assert all(line.startswith((own[0], own[1])) for line in lines_of_cells)
    assert all(sum(f"{name}epoch 1 of 1" in line for line in lines_of_cells) == 1 for name in own[:2])
    assert all(
        sum(line.startswith(f"{name}batch_size must be") for line in done.stderr.splitlines()) == 1 for name in own[2:]
    )
    assert title.split() == ["accuracy", "payload", "time", "cell"] and where.endswith("/sweep.jsonl")
    for number, (row, words) in enumerate(zip((first, second, third, fourth), swept, strict=True), 1):
        assert re.fullmatch(
            rf"{number} +({'refused' if words.startswith('batch_size=0') else '.* % .*B .* s'}) +{words}", row
        )
    assert {RunFolder(path).read_config()["choices"]["compressor"] for path in folders} == {"none", "topk"}
    assert all(RunFolder(path).read_json("summary.json")["epochs"] == 1 for path in folders)
    assert "2 of 4 cells did not come to their end" in done.stderr and "Traceback" not in done.stderr
    assert {int(file.read_text()) for file in threads.iterdir()} == {max(1, joblib.cpu_count() // 2)}


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [True, False])
def test_ctrl_c_under_joblib(whole_group, tmp_path):
    """Cells that train save; cells that wait do not begin; workers without a cell break nothing."""
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=3", "epochs=100000"]
    for seeds, cells in (("seed=0,1", 2), ("seed=0,1,2,3,4", 3)):
        runs = tmp_path / str(cells)
        arguments = [*tiny.COMMAND, "-m", *tiny.typed(runs, *launcher, seeds)]
        process = subprocess.Popen(arguments, cwd=HOUSE, start_new_session=True, stderr=subprocess.PIPE, text=True)
        try:
            while len(list(runs.glob("*/metrics.jsonl"))) < cells:
                assert process.poll() is None
                time.sleep(0.1)
            (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
            _, told = process.communicate(timeout=100)
        finally:
            for pid in group_members(process.pid):
                os.kill(pid, signal.SIGKILL)
        assert process.returncode == 130, told
        assert statuses(runs) == ["interrupted"] * cells == ["interrupted"] * len(tiny.folders(runs))
        assert all(list(path.glob("checkpoint/step-*")) for path in tiny.folders(runs))
        assert f"{cells} of {cells} cells did not come to their end" in told and "Traceback" not in told


@pytest.mark.slow
def test_a_worker_that_is_killed(tmp_path):
    """What cannot be recorded by the cell itself: one sentence, and the way out.

    joblib's process that cleans up after the killed one may warn at any time, after the last word, too.
    """
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "seed=0,1"]
    done = run_cells(tmp_path, *launcher, TINY_TROUBLE="kill:0:9")
    assert done.returncode == 1
    assert "\ntype the same command with resume_sweep=true to run what is missing\n" in done.stderr
    assert "a process of the sweep was killed" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_submitit(tmp_path):
    """Jobs on this machine as they would run under Slurm; then a second sweep finds all done."""
    for expected in ("done", "skipped"):
        options = ["hydra/launcher=submitit_local", "hydra.launcher.cpus_per_task=1", "resume_sweep=true"]
        done = run_cells(tmp_path, *options, "epochs=1", "compressor=none,topk,atomo", "optimizer.momentum=0")
        assert done.returncode == 0, done.stderr
        assert statuses(tmp_path)[-3:] == [expected] * 3
        title, *rows, where = done.stdout.splitlines()
        assert [row.split()[-1] for row in rows] == [f"compressor={name}" for name in ("none", "topk", "atomo")]
        assert "accuracy" in title and where == f"folders: {tmp_path / sweep.FILE}"
    assert find_runs([tmp_path]) == tiny.folders(tmp_path)


def test_slurm_is_composed(capsys, monkeypatch):
    typed = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=cpu", "hydra.launcher.cpus_per_task=8"]
    assert main(monkeypatch, *typed, "--cfg", "hydra", "--package", "hydra.launcher") == 0
    shown = capsys.readouterr().out
    assert "submitit_launcher.SlurmLauncher" in shown and "partition: cpu" in shown and "tasks_per_node: 1" in shown


def test_a_cell_is_one_task_of_slurm(tmp_path):
    """submitit starts a cell with srun, as one task: no process group is waited for, and it may spawn its own."""
    environ = {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    for overrides, place in (((), ("simulated", 1, 4)), (("comm=gloo", "comm.processes=2"), ("gloo", 2, 2))):
        where = placement.place(RunConfig.from_dict(tiny.cfg(tmp_path, "comm=auto", *overrides)), environ, gpus=0)
        assert (where.backend, where.processes, where.workers_per_process) == place
        assert where.launcher == "self"


def test_only_the_leader_of_several_tasks_records(tmp_path, monkeypatch):
    mine = sweep.Sweep()
    mine.file = tmp_path / sweep.FILE
    for variable in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.setenv(variable, "1")
        mine.append({"overrides": [], "status": "done"})
        monkeypatch.delenv(variable)
    assert not mine.file.exists()
    mine.append({"overrides": [], "status": "done"})
    assert statuses(tmp_path) == ["done"]


@pytest.mark.parametrize("set_by_user, expected", [(None, "6"), ("2", "2")])
def test_threads_of_a_job(set_by_user, expected, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if set_by_user:
        monkeypatch.setenv("OMP_NUM_THREADS", set_by_user)
    sweep.limit_threads({"cpus_per_task": None})
    assert os.environ.get("OMP_NUM_THREADS") == set_by_user
    sweep.limit_threads({"cpus_per_task": 6})
    assert os.environ.pop("OMP_NUM_THREADS") == expected


def test_a_launcher_that_is_not_installed(monkeypatch, capsys):
    assert main(monkeypatch, "-m", "hydra/launcher=jobliib", "seed=0,1") == 2
    told = capsys.readouterr().err
    assert told.startswith("hydra/launcher must be one of basic, joblib, submitit_local, submitit_slurm, got jobliib")
