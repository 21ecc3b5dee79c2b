"""--print, show, tags and notes, completion: what a command and a folder say of a run, before and after it."""

import os
import shutil
import subprocess
import sys

import pytest
import yaml

from accordion_bench import train
from accordion_bench.cli import show
from accordion_bench.config.compose import as_written
from accordion_bench.config.value_checks import refuse_wrong
from accordion_bench.options.checks import ConfigError
from accordion_bench.report.read import read_run
from accordion_bench.report.render.captions import facts
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import reuse
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed, tiny
from tests.kit.light import light
from tests.kit.paths import ROOT
from tests.runs.test_resume import stopping_after


def test_the_configuration_is_printed_as_the_folder_will_hold_it(tmp_path):
    cfg = {**tiny.cfg(tmp_path / "runs", "epochs=1", "tags=[x]"), "note": "a, b: ü"}
    train.run(cfg)
    saved = RunFolder(tiny.only(tmp_path / "runs")).read_config()
    assert {**yaml.safe_load(as_written({**cfg, "workers": None})), "workers": saved["workers"]} == saved
    with pytest.raises(ConfigError, match=r"--print shows a new run, got resume=x; type cat x/config\.yaml"):
        as_written({**cfg, "resume": "x"})


def test_printing_imports_no_torch_and_leaves_nothing(tmp_path):
    words = ["compressor=topk", "tracker=[csv,wandb]", f"paths.runs={tmp_path}/runs"]
    commands = [["--print", *words], ["--print", "-m", "seed=0,1", *words], ["--print", "epochs=0"]]
    one, several, wrong = light(commands, tmp_path)
    assert (one.returncode, several.returncode) == (0, 0), one.stderr + several.stderr
    assert yaml.safe_load(one.stdout) == composed.cfg(*words)
    cells = list(yaml.safe_load_all(several.stdout))
    assert [cell["seed"] for cell in cells] == [0, 1] and not any(tmp_path.iterdir())
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "epochs must be an integer of at least 1, got 0; type epochs=60\n"


def test_show(tmp_path, capsys):
    runs = tmp_path / "runs"
    cfg = tiny.cfg(runs, "compressor=topk", "tags=[final,long]", "note=as in the paper", "checkpoint.every=2")
    with stopping_after(tiny.STEPS + 2), pytest.raises(KeyboardInterrupt):
        train.run(cfg)
    folder = tiny.only(runs)
    assert show.main([str(folder)]) == 0
    stopped = capsys.readouterr().out
    assert "ended      not yet, after 1 epoch: stopped by " in stopped
    assert f"go on with: python -m accordion_bench resume={folder}\n" in stopped
    train.run({**cfg, "resume": str(folder)})
    capsys.readouterr()
    assert show.main([str(folder)]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line[0] != " ")
    summary = RunFolder(folder).read_json("summary.json")
    assert lines["run"] == str(folder) and lines["ended"] == f"after {cfg['epochs']} epochs"
    assert (lines["tags"], lines["note"]) == ("final, long", "as in the paper")
    assert lines["accuracy"].startswith(f"{100 * summary['metric']:.2f} % in the last epoch, ")
    assert lines["what"].startswith("resnet18 (") and lines["method"].startswith("TopK")
    assert lines["payload"].endswith("MB)") or "(dense" in lines["payload"]


def test_what_cannot_be_shown(tmp_path, capsys):
    for name in ("a", "b"):
        RunFolder.create(str(tmp_path), name, composed.cfg())
    newest = max(tmp_path.iterdir())
    for words, told in {
        (): "show must stand before a run's folder, got none; type show results/runs/RUN\n",
        (str(tmp_path),): f"RUN must be one run's folder, got {tmp_path}, which holds 2 runs; type show {newest}\n",
        (f"{tmp_path}/x",): f"RUN must be a run's folder, got {tmp_path}/x, which holds none; type show results/",
    }.items():
        assert show.main(words) == 2
        assert told in capsys.readouterr().err
    assert show.main([str(newest)]) == 0 and "ended      not yet, after 0 epochs" in capsys.readouterr().out


def test_tags_and_notes_make_no_other_run_and_may_change(tmp_path):
    plain = tiny.cfg(tmp_path / "runs")
    told = {**plain, "tags": ["final"], "note": "first"}
    assert reuse.decisive(plain) == reuse.decisive(told)
    with stopping_after(tiny.STEPS + 2), pytest.raises(KeyboardInterrupt):
        train.run(told)
    folder = tiny.only(tmp_path / "runs")
    train.run({**plain, "resume": str(folder), "note": "second"}, {"note": "second"})
    saved = RunFolder(folder).read_config()
    assert (saved["tags"], saved["note"]) == (["final"], "second")
    run = read_run(folder)
    assert run.finished and {"tags": "final", "notes": f"{folder.name}: second"}.items() <= facts([run]).items()


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("tags", "final", "tags must be a list of words of 1 to 40 .*, or null, got final; type tags=\\[final\\]"),
        ("tags", [], "tags must be a list of words .*, got \\[\\]; type tags=null"),
        ("tags", ["a", 3], "tags must be a list of words .*, got \\[a,3\\]; type tags=\\[a\\]"),
        ("note", 7, "note must be text of 1 to 1000 printable characters in one line, got 7; type note='note 7'"),
        ("note", "a\nb", r"note must be text .*, got 'a\\nb'; type note='a b'"),
        ("note", "", "note must be text .*, got ''; type note=TEXT"),
    ],
)
def test_wrong_tags_and_notes(key, value, told):
    with pytest.raises(ConfigError, match=told):
        refuse_wrong(RunConfig.from_dict({**composed.cfg(), key: value}))


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_the_installed_command(tmp_path):
    """Hydra's completion, as docs/sweeps.md has it."""
    command = tmp_path / "accordion-bench"
    command.write_text(f"#!{sys.executable}\nfrom accordion_bench.__main__ import main\nmain()\n")
    command.chmod(0o755)
    script = """
eval "$(accordion-bench -sc install=bash)"
COMP_LINE="accordion-bench compressor=powers" COMP_POINT=33 COMP_CWORD=1
hydra_bash_completion
echo "${COMPREPLY[@]}"
"""
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    found = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environ, timeout=120)
    assert found.stdout.strip() == "compressor=powersgd", found.stderr
