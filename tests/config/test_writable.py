"""A folder that takes no files is one sentence, with another folder to type: before data, training and Hydra's own."""

import os
import shlex
import subprocess
import sys

import pytest

from accordion_bench.config import compose
from accordion_bench.options.checks import ConfigError
from tests.kit import tiny
from tests.kit.paths import ROOT


@pytest.fixture
def read_only(tmp_path):
    """A folder on a file system that is mounted read-only."""
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", tmp_path]).returncode:
        pytest.skip("only root mounts file systems, and not everywhere")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_the_sentence_names_a_folder_that_can_be_written(read_only, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(read_only)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home with spaces")))
    for typed, here in (("results/runs", f" in {read_only}"), (f"{read_only}/x/runs", "")):
        with pytest.raises(ConfigError) as refused:
            compose.refuse_unwritable("paths.runs", typed)
        told, _, instead = str(refused.value).partition("; type ")
        assert told == f"paths.runs must be a folder that can be written, got {typed}{here}: Read-only file system"
        (word,) = shlex.split(instead)
        key, _, place = word.partition("=")
        assert key == "paths.runs"
        compose.refuse_unwritable(key, place.strip("'"))
    monkeypatch.setenv("HOME", str(read_only))
    with pytest.raises(ConfigError, match=r"type paths.runs=/.*/results/runs$") as refused:
        compose.refuse_unwritable("paths.runs", "results/runs")
    assert f"type paths.runs={read_only}" not in str(refused.value)


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match=f"got {tmp_path}/runs: {tmp_path}/runs is a file; type paths.runs=/"):
        compose.refuse_unwritable("paths.runs", f"{tmp_path}/runs")


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["-m", "seed=0,1"], ["-m", "seed=0,1", "hydra/launcher=joblib"]])
def test_in_a_read_only_folder(words, read_only):
    """Hydra makes folders of its own for sweeps: it would be a traceback."""
    typed = [word for word in tiny.typed(read_only) if not word.startswith("paths.")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "accordion_bench", *words, *typed]
    done = subprocess.run(command, cwd=read_only, env=environ, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("paths.runs must be a folder that can be written, got results/runs in ")
