"""A run folder from somebody else: what it names is not called."""

import os

import pytest
import yaml

from accordion_bench import train
from accordion_bench.config import continuation
from accordion_bench.options.checks import ConfigError
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed, tiny

GROUPS = ("model", "dataset", "compressor", "optimizer", "schedule", "sync", "network", "tracker")
PLACES = (*GROUPS, "adaptive.accordion", "sync.outer", "comm.hook")
OURS = ["model=resnet8", "dataset=synthetic", "compressor=powersgd", "adaptive=accordion"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run folder without a checkpoint, as its config.yaml."""
    cfg = composed.cfg(f"paths.runs={tmp_path_factory.mktemp('runs')}", *OURS)
    return RunFolder.create(cfg["paths"]["runs"], "mine", cfg)


def with_value(config: dict, key: str, value: object) -> dict:
    head, _, rest = key.partition(".")
    return {**config, head: with_value(config.get(head) or {}, rest, value) if rest else value}


@pytest.mark.parametrize("key", [f"{place}._target_" for place in PLACES])
@pytest.mark.parametrize("path", ["os.system", "accordion_bench.trackers.tracker.Tracker", ["os.system"], "torch.load"])
def test_a_foreign_class_is_refused_before_anything_is_called(saved, key, path, monkeypatch):
    called = []
    monkeypatch.setattr(os, "system", called.append)
    if (key, path) == ("tracker._target_", "accordion_bench.trackers.tracker.Tracker"):
        return  # ours, where it belongs
    foreign = with_value(saved.read_config(), key, path)
    if key.startswith("model"):
        foreign["model"]["command"] = "touch foreign"
    (saved.path / "foreign.yaml").write_text(yaml.safe_dump(foreign))
    monkeypatch.setattr(RunFolder, "read_config", lambda self: yaml.safe_load((self.path / "foreign.yaml").read_text()))
    cfg = composed.cfg(f"resume={saved.path}", f"paths.runs={saved.path.parent}")
    with pytest.raises(ConfigError) as refused:
        train.run(cfg)
    assert "resume must be a run whose classes are ours or named by you" in str(refused.value)
    assert key in str(refused.value) and not called


def test_a_class_that_the_command_names_is_trusted_in_that_place(tmp_path):
    cfg = tiny.cfg(tmp_path)
    folder = RunFolder.create(str(tmp_path), "tiny", cfg)
    alone = composed.cfg(f"resume={folder.path}")
    with pytest.raises(ConfigError, match=r"model._target_=tests.kit.tiny.Net; type model._target_=tests.kit.tiny.Net"):
        continuation.refuse_foreign_code(folder.read_config(), alone, folder)
    named = composed.cfg(f"resume={folder.path}", "model._target_=tests.kit.tiny.Net")
    continuation.refuse_foreign_code(folder.read_config(), named, folder)
    elsewhere = composed.cfg(f"resume={folder.path}", "dataset._target_=tests.kit.tiny.Net")
    with pytest.raises(ConfigError, match=r"model\._target_"):
        continuation.refuse_foreign_code(folder.read_config(), elsewhere, folder)


def test_what_is_to_be_typed_to_go_on_is_enough(tmp_path):
    cfg = tiny.cfg(tmp_path)
    folder = RunFolder.create(str(tmp_path), "tiny", cfg)
    *_, resume, named = continuation.continuing(cfg, folder).split()
    assert (resume, named) == (f"resume={folder.path}", "model._target_=tests.kit.tiny.Net")
    continuation.refuse_foreign_code(folder.read_config(), composed.cfg(resume, named), folder)
