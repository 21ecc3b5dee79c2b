"""Full disks, kills and random bytes: nothing is lost, and what is left can be read."""

import contextlib
import logging
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from accordion_bench import train
from accordion_bench.comm.collectives import Comm
from accordion_bench.options.checks import ConfigError
from accordion_bench.report.read import read_run
from accordion_bench.runs import checkpoint
from accordion_bench.runs.checkpoint import Owners
from accordion_bench.runs.folder import RunFolder, log
from accordion_bench.runs.saving import BlockingWriter, Manifest, Saving, Trained
from tests.kit import tiny
from tests.kit.processes import killed, start_forking
from tests.runs import test_checkpoint
from tests.runs.test_resume import differences, resume, start, state

ARM = "compressor=topk"


@pytest.fixture(autouse=True)
def same_generator():
    torch.manual_seed(0)  # its state is saved, too, although no run draws from it


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The state that a run ends in."""
    runs = tmp_path_factory.mktemp("straight")
    torch.manual_seed(0)
    train.run(start(runs, ARM))
    return state(tiny.only(runs))


# ---- a full disk


@contextlib.contextmanager
def small_disk(runs: Path, filled: int) -> Iterator[Path]:
    """A file system of 1 MB at `runs`, and a file of so many bytes that may be removed."""
    runs.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", runs], capture_output=True).returncode
    ):
        pytest.skip("only root mounts file systems, and not everywhere")
    filler = runs / "filler"
    try:
        with contextlib.suppress(OSError):
            filler.write_bytes(bytes(filled))
        yield filler
    finally:
        subprocess.run(["umount", runs], check=True)


def fill(tmp_path: Path, levels: range, straight: dict) -> None:
    """With so many kB left on the disk: a result or one sentence; with room again, the run ends as if nothing was."""
    refused = 0
    for left in levels:
        with small_disk(tmp_path / str(left), (1024 - left) * 1024) as filler:
            cfg = start(filler.parent, ARM)
            try:
                train.run({**cfg, "checkpoint": tiny.saving(5, keep=2)})
            except ConfigError as full:
                assert "No space left on device" in str(full) and "\n" not in str(full)
                refused += 1
            filler.unlink()
            for folder in filter(lambda path: (path / "config.yaml").exists(), tiny.folders(filler.parent)):
                read_run(folder)
                if not RunFolder(folder).done:
                    torch.manual_seed(0)
                    resume(folder, cfg, checkpoint=tiny.saving(24))
                    assert differences(state(folder), straight) == []
    assert refused


def test_a_disk_that_is_full_at_some_write(tmp_path, straight):
    fill(tmp_path, range(0, 200, 96), straight)


@pytest.mark.slow
def test_a_disk_that_is_full_at_every_write(tmp_path, straight):
    fill(tmp_path, range(0, 300, 4), straight)


def test_a_full_disk_hides_no_first_error(tmp_path, monkeypatch):
    """The log, the summary: nothing can be written any more while the run ends because of something else."""

    def open_on_a_full_disk(self: logging.FileHandler):
        return open("/dev/full", "a", encoding="utf-8")

    def full(self: RunFolder, name: str, content: dict) -> None:
        raise OSError(28, "No space left on device")

    class Failing:
        def __init__(self, *_: object) -> None:
            monkeypatch.setattr(RunFolder, "_write", full)
            log.warning("about to fail")
            raise ValueError("the first error")

    monkeypatch.setattr("accordion_bench.runs.folder._Log._open", open_on_a_full_disk)
    monkeypatch.setattr("accordion_bench.training.trainer.Trainer", Failing)
    with pytest.raises(ValueError, match="the first error"):
        train.run(tiny.cfg(tmp_path))


# ---- killed


def train_cells(*cells: dict) -> None:
    """One after another, each step saved."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for cell in cells:
        train.run({**cell, "checkpoint": tiny.saving(1)})


def kill_saving_runs(tmp_path: Path, times: int, straight: dict) -> None:
    """Each step is saved, so that most moments are inside of a save; one moment in each part of the run's time."""
    rng = random.Random(0)
    start_forking()
    began = time.monotonic()
    assert not killed(60, train_cells, start(tmp_path / "timed", ARM))
    longest, early = time.monotonic() - began, 0
    for number in range(times):
        runs = tmp_path / str(number)
        cfg = start(runs, ARM)
        early += killed((number + rng.random()) / times * longest, train_cells, cfg)
        for folder in filter(lambda path: (path / "config.yaml").exists(), tiny.folders(runs) if runs.exists() else []):
            read_run(folder)
            if not RunFolder(folder).done:
                torch.manual_seed(0)
                resume(folder, cfg, checkpoint=tiny.saving(24))
            assert RunFolder(folder).done and differences(state(folder), straight) == []
        shutil.rmtree(runs, ignore_errors=True)
    assert early


def test_killed_at_some_random_moments(tmp_path, straight):
    kill_saving_runs(tmp_path, 2, straight)


@pytest.mark.slow
def test_killed_at_fifty_random_moments(tmp_path, straight):
    kill_saving_runs(tmp_path, 50, straight)


def kill_sweeps(tmp_path: Path, times: int) -> None:
    """The same command again and again, with `resume_sweep`, until it comes to its end: each cell is done once."""
    cells = [tiny.cfg(tmp_path, ARM, f"seed={seed}", "epochs=1", "resume_sweep=true") for seed in range(6)]
    rng = random.Random(1)
    for _ in range(times):
        if not killed(rng.uniform(0, 0.5), train_cells, *cells):
            break
    train_cells(*cells)
    found = [read_run(folder) for folder in tiny.folders(tmp_path)]
    assert sorted(run.seed for run in found if run.finished) == list(range(6))


def test_a_sweep_that_is_killed_again_and_again(tmp_path):
    kill_sweeps(tmp_path, 3)


@pytest.mark.slow
def test_a_sweep_that_is_killed_fifty_times(tmp_path):
    kill_sweeps(tmp_path, 50)


# ---- a summary that cannot be read


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: file.write_text("{")])
def test_a_run_without_a_readable_summary_is_not_done(damage, tmp_path, straight):
    """It goes on from its last checkpoint, which is its end, and writes what is missing."""
    cfg = start(tmp_path, ARM)
    train.run(cfg)
    folder = tiny.only(tmp_path)
    before = RunFolder(folder).read_json("summary.json")
    damage(folder / "summary.json")
    assert not RunFolder(folder).done
    train.run({**cfg, "resume_sweep": True})
    assert tiny.only(tmp_path) == folder and RunFolder(folder).done
    after = RunFolder(folder).read_json("summary.json")
    timed = {key for key in before if "seconds" in key} | {"waited_for_cores"}
    assert {key: value for key, value in after.items() if key not in timed} == {
        key: value for key, value in before.items() if key not in timed
    }
    assert differences(state(folder), straight) == []


# ---- random bytes


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Some bytes are others, missing, or doubled."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        at = rng.randrange(len(changed) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(changed):
            changed[at] = rng.randrange(256)
        elif kind == 1:
            changed[at : at + rng.randrange(1, 64)] = b""
        elif kind == 2:
            changed[at:at] = rng.randbytes(rng.randrange(1, 64))
        else:
            del changed[at:]
    return bytes(changed)


def fuzz(tmp_path: Path, cases: int) -> None:
    """A checkpoint whose files hold random bytes gives way to the one before, or to one sentence."""
    rng, read, told, comm = random.Random(2), 0, 0, Comm(2)
    for step in (6, 12):
        common = test_checkpoint.Common(step)
        trained = Trained(step // 6, step, step % 6, 6)
        state = Owners([common], [test_checkpoint.Own(common)])
        checkpoint.save(Saving(tmp_path, Manifest(trained, {}, {}), 2), comm, state, BlockingWriter(comm))
    files = sorted((tmp_path / "checkpoint").glob("*/*"))
    whole = {file: file.read_bytes() for file in files}
    for _ in range(cases):
        hurt = rng.sample(files, rng.randrange(1, 4))
        for file in hurt:
            file.write_bytes(mutate(whole[file], rng))
        try:
            path, problems = checkpoint.load_newest(tmp_path, comm, test_checkpoint.owners())
            read += path is not None and len(problems) in (0, 1)
        except ConfigError as refused:
            assert "\n" not in str(refused)
            told += 1
        for file in hurt:
            file.write_bytes(whole[file])
    assert read + told == cases and read and told
    assert test_checkpoint.names(tmp_path) == ["step-00000006", "step-00000012"]


def test_some_random_bytes_in_checkpoints(tmp_path):
    fuzz(tmp_path, 60)


@pytest.mark.slow
def test_random_bytes_in_checkpoints(tmp_path):
    fuzz(tmp_path, 800)
