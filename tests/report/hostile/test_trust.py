"""Whose classes a report imports: ours, those of --config-dir, and of all others with --trust."""

import sys

import pytest
import yaml

from accordion_bench.methods import labels
from accordion_bench.methods.labels import declared
from accordion_bench.options import conf_dir, instantiate
from accordion_bench.report import parallel, read
from accordion_bench.report.__main__ import main as report_main
from tests.kit.paths import ROOT
from tests.report.test_report import no_figures, node, run_folder  # noqa: F401

MODULE = """
from pathlib import Path

from accordion_bench.compressors.topk import TopK
from accordion_bench.schedules.learning_rate import MultiStep

Path({file!r}).touch()


class Sparse(TopK):
    pass


class Halved(MultiStep):
    pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch, no_figures):  # noqa: F811
    """A run of a user's own compressor; whether its module has been imported."""
    ran = tmp_path / "ran"
    (tmp_path / "somebodys.py").write_text(MODULE.format(file=str(ran)), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(instantiate, "_added", set())
    monkeypatch.setattr(conf_dir, "_own", [])
    options = {"compressor___target_": "somebodys.Sparse", "schedule___target_": "somebodys.Halved"}
    named = {"model": "resnet8", "dataset": "digits", "compressor": "sparse", "sync": "every_step"}
    run_folder(tmp_path / "runs", "topk", choices=named, **options)
    yield ran
    sys.modules.pop("somebodys", None)


def report(*typed: str) -> int:
    return report_main(["runs", "--out", "out", *typed])


def test_a_foreign_target_is_a_label_only(own, capsys):
    assert report() == 0
    assert "| Sparse 10 % |" in capsys.readouterr().out
    (run,) = read.read_runs(["runs"])
    assert labels.levels_of(run.config, "density") == [0.1]
    assert len(parallel.lr_drops(run.config, run.rows)) == 1 and parallel.dense_layers(run.config, 0.1) == frozenset()
    assert not own.exists() and "somebodys" not in sys.modules


def test_trust_imports_what_the_folders_name(own):
    assert report("--trust") == 0
    assert own.exists()


def test_a_class_of_config_dir_is_imported(own, tmp_path):
    (tmp_path / "conf" / "compressor").mkdir(parents=True)
    (tmp_path / "conf" / "compressor" / "sparse.yaml").write_text("_target_: somebodys.Sparse\ndensity: 0.1\n")
    assert report("--config-dir", "conf") == 0
    assert own.exists()


def test_a_config_dir_that_is_none_is_one_sentence(own, capsys):
    assert report("--config-dir", "nowhere") == 2
    assert capsys.readouterr().err.startswith("--config-dir must be a folder with config groups in it, got nowhere")


def test_a_class_of_another_group_is_not_built(tmp_path, monkeypatch):
    """Wandb's tracker as a schedule, torchvision as a compressor: ours, and not to be called here."""
    run_folder(tmp_path, "none", schedule___target_="accordion_bench.trackers.services.Wandb")
    (run,) = read.read_runs([tmp_path])
    monkeypatch.setattr(parallel, "build", lambda *_, **__: pytest.fail("built"))
    assert parallel._schedule(run.config) is None


@pytest.mark.parametrize(
    ("group", "options"),
    [
        ("model", {"_target_": "accordion_bench.models.resnet.CifarResNet", "depth": 6 * 10**12 + 2}),
        ("model", {**node("model", "lstm"), "layers": 10**9}),
        ("dataset", {**node("dataset", "digits"), "subset": [[1]]}),
        ("compressor", {**node("compressor", "topk"), "density": [0.1] * 1000}),
    ],
)
def test_a_model_that_would_take_all_memory_is_not_rebuilt(group, options, tmp_path, monkeypatch):
    run_folder(tmp_path, "topk")
    (run,) = read.read_runs([tmp_path])
    monkeypatch.setattr("accordion_bench.compressors.assemble.wrapped_compressor", lambda *_: pytest.fail("built"))
    assert parallel.dense_layers({**run.config, group: options}, 0.1) == frozenset()


def test_old_names_of_our_classes_are_trusted(tmp_path):
    old = {**node("sync", "noloco"), "_target_": "accordion_bench.sync.noloco.NoLoCo"}
    run_folder(tmp_path, "topk", sync=old)
    (run,) = read.read_runs([tmp_path])
    assert run.config["sync"]["_target_"] == "accordion_bench.sync.local_sgd.NoLoCo"
    assert instantiate.is_trusted(run.config["sync"]["_target_"])


def test_every_class_of_ours_still_has_its_label():
    """What an honest run names is found: no choice of ours has lost its class."""
    for group in ("compressor", "sync", "adaptive"):
        for file in (ROOT / "conf" / group).rglob("*.yaml"):
            options = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
            if "_target_" in options:
                assert declared(options) is not None, file
