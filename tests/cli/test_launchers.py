"""Launchers and sweepers that are not there, not whole, or cannot start anything: one sentence before any cell."""

import sys

import pytest

from accordion_bench import __main__ as command
from accordion_bench.cli import launchers
from accordion_bench.options.checks import ConfigError

SLURM = {"_target_": "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"}


@pytest.mark.parametrize("there", [(), ("srun",), ("sbatch",)])
def test_slurm_without_its_commands(monkeypatch, there):
    monkeypatch.setattr(launchers.shutil, "which", lambda name: name if name in there else None)
    missing = " and ".join(name for name in launchers.OF_SLURM if name not in there)
    with pytest.raises(ConfigError, match=f"got a machine without {missing}; type hydra/launcher=joblib"):
        launchers.refuse(SLURM)


def test_where_the_commands_are_and_for_other_launchers(monkeypatch):
    launchers.refuse({"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"})
    monkeypatch.setattr(launchers.shutil, "which", lambda name: name)
    launchers.refuse(SLURM)


def test_the_command_line_says_so_and_runs_nothing(monkeypatch, tmp_path, capsys):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    monkeypatch.setattr(launchers.shutil, "which", lambda name: None)
    typed = ["-m", "hydra/launcher=submitit_slurm", "seed=0,1", f"paths.runs={tmp_path / 'runs'}"]
    monkeypatch.setattr(sys, "argv", ["accordion_bench", *typed])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 2 and not (tmp_path / "runs").exists()
    told = capsys.readouterr().err
    assert told.startswith("hydra/launcher=submitit_slurm must be typed where srun and sbatch are")
    assert told.endswith("(nothing has been run)\n") and told.count("\n") == 1


def failing(tmp_path, body: str) -> BaseException:
    """What comes out of a plugin's launcher."""
    file = tmp_path / "hydra_plugins" / "hydra_far_launcher" / "launcher.py"
    file.parent.mkdir(parents=True)
    file.write_text(f"def launch():\n    {body}\n")
    scope: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    with pytest.raises(Exception) as caught:
        scope["launch"]()
    return caught.value


def test_a_package_that_is_missing(tmp_path):
    told = launchers.explain_launcher(failing(tmp_path, "import nowhere_to_be_found.core"))
    assert told == (
        "hydra/launcher of far needs nowhere_to_be_found, which is not installed; type pip install nowhere_to_be_found"
    )


def test_one_that_cannot_start(tmp_path):
    told = launchers.explain_launcher(failing(tmp_path, "raise RuntimeError('no cluster here\\nsecond line')"))
    assert told == f"hydra/launcher of far must be able to start here, got: no cluster here; type {launchers.HERE}"


def test_other_errors_are_not_a_launchers(tmp_path):
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("ours")
    assert launchers.explain_launcher(caught.value) is None
    assert launchers.explain_launcher(failing(tmp_path, "raise ValueError('x') from KeyError('of a cell')")) is None
