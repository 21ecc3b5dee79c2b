"""The example of parts from outside the checkout: used through --config-dir by every door."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accordion_bench import conformance
from accordion_bench.adaptive.policy import Policy
from accordion_bench.cli import command_line, help
from accordion_bench.config.compose import compose
from accordion_bench.conformance.__main__ import main as check_conformance
from accordion_bench.methods import compatibility
from accordion_bench.options import advice
from accordion_bench.options import conf_dir as where_conf_is
from accordion_bench.options.checks import ConfigError
from accordion_bench.report.__main__ import main as report
from accordion_bench.report.read import load_metrics, load_runs
from tests.kit import composed, pages
from tests.kit.own_parts import EXAMPLE
from tests.kit.paths import ROOT

PAGE = EXAMPLE.relative_to(ROOT) / "README.md"
GROUPS = ["compressor", "model", "dataset", "adaptive"]
MINE = [f"{group}=mine" for group in GROUPS]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of the console script in the example's folder, which is not on its path otherwise; its folder."""
    runs = tmp_path_factory.mktemp("runs")
    script = Path(sys.executable).with_name("accordion-bench")
    options = ["epochs=2", "batch_size=64", f"paths.runs={runs}"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [script, "--config-dir", "conf", *MINE, *options], cwd=EXAMPLE, env=environ, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return Path(ended.stdout.splitlines()[-1])


def test_the_console_script_trains_with_them(run):
    rows = load_metrics([run])
    assert [set(levels.values()) for levels in rows["plan.levels"]] == [{0.25}, {0.1}]
    assert rows["payload_bytes"].is_monotonic_increasing and rows["payload_bytes"].iloc[-1] > 0
    assert (rows["payload_bytes"] < rows["dense_bytes"]).all()


def test_the_command_of_its_page_ends_at_its_best(tmp_path):
    command = next(c for c in pages.commands(pages.blocks(PAGE)[0]) if "compressor=mine" in c.words)
    words = [Path(sys.executable).with_name("accordion-bench"), *command.words[1:], f"paths.runs={tmp_path}"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, cwd=EXAMPLE, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads((Path(ended.stdout.splitlines()[-1]) / "summary.json").read_text())
    assert found["metric"] >= found["best_metric"] - 0.03 > 0.9  # 128 images: two points and a bit are noise
    assert "warning" not in ended.stdout


@pytest.mark.parametrize("check", ["payload", "mean", "non_finite"])
def test_the_smallest_compressor_of_its_page(inside, check, tmp_path, monkeypatch, capsys):
    program = next(block.text for block in pages.blocks(PAGE) if block.language == "python")
    (tmp_path / "conf" / "compressor").mkdir(parents=True)
    (tmp_path / "conf" / "compressor" / "byte.yaml").write_text("_target_: byte.Byte\n")
    (tmp_path / "byte.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    few = [each for each in conformance.CHECKS if conformance.name_of(each) == check]
    monkeypatch.setattr(conformance, "CHECKS", few)
    assert check_conformance(["--config-dir", "conf", "compressor=byte"]) == 0
    assert capsys.readouterr().out.split()[1] == "pass"


def test_the_report_shows_them(run, inside, tmp_path, capsys):
    assert load_runs([run])["label"].tolist() == ["mine (mine 10 %)"]  # of classes that nobody trusts, by their options
    assert report([str(run), "--config-dir", "conf", "--out", str(tmp_path), "--formats", "md"]) == 0
    assert "| mine (mine) |" in (said := capsys.readouterr().out) and "mine on mine" in said


def test_the_conformance_kit_takes_one(inside, monkeypatch, capsys):
    few = [check for check in conformance.CHECKS if conformance.name_of(check) in ("payload", "mean")]
    monkeypatch.setattr(conformance, "CHECKS", few)
    assert check_conformance(["--config-dir", "conf", "compressor=mine", "compressor.density=0.2"]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["pass"] * 2
    assert check_conformance(["compressor=mine", "--config-dir=nowhere"]) == 2
    assert "--config-dir must be a folder with config groups in it" in capsys.readouterr().err


@pytest.mark.slow
def test_the_compressor_keeps_every_promise(inside):
    where_conf_is.add_conf_dir("conf")
    make = conformance.from_yaml("mine")
    assert {conformance.run(check, make).status for check in conformance.CHECKS} == {"pass", "n/a"}


def test_their_options_are_known_as_ours_are(inside):
    command_line.refuse_unreadable(["--config-dir", "conf", *MINE])
    assert "dataset.noise=0.5" in help.text(["--help", "dataset=mine", "--config-dir", "conf"])
    assert all("mine" in advice.choices(group) for group in GROUPS)
    assert {"model.width", "dataset.noise", "adaptive.mine.first"} <= advice.known_keys().keys()
    assert compatibility.knobs()["mine"] == "density"
    cfg = compose([*MINE, "workers=4", "compressor.density=much"])
    with pytest.raises(
        ConfigError, match=r"compressor.density must be a number, got much; type compressor.density=0.1"
    ):
        composed.validated(cfg)


def test_a_name_of_ours_stays_ours(inside, tmp_path):
    (tmp_path / "compressor").mkdir()
    (tmp_path / "compressor" / "topk.yaml").write_text("_target_: mine.InTurn\n")
    where_conf_is.add_conf_dir(str(tmp_path))
    assert where_conf_is.yaml_files("compressor")["topk"].parent == where_conf_is.conf_dir() / "compressor"
    assert compose(["compressor=topk"])["compressor"]["_target_"].endswith(".TopK")


@pytest.mark.parametrize(
    "typed", [["--config-dir", "conf"], ["--config-dir=conf"], ["-cd", "conf"], ["--config-di", "conf"]]
)
def test_every_spelling_of_the_folder(typed):
    assert command_line.config_dirs([]) == command_line.config_dirs(["--config-dir"]) == []
    assert command_line.config_dirs(["epochs=3", *typed, "seed=1"]) == ["conf"]


def test_the_current_folder_comes_last(inside, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    where_conf_is.import_from_here()
    where_conf_is.import_from_here()
    assert sys.path == ["/elsewhere", str(tmp_path)]


def test_a_policy_that_plans_values_is_told_so(inside, monkeypatch):
    import mine

    where_conf_is.add_conf_dir("conf")
    assert issubclass(mine.WeakAtFirst, Policy)
    monkeypatch.setattr(mine.WeakAtFirst, "start", lambda self, plan, ladder, run: plan.with_levels({"w": 0.1}))
    with pytest.raises(ConfigError, match=r"^adaptive.mine must plan"):
        composed.validated(compose([*MINE, "workers=4"]))
