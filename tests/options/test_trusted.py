"""Which classes a configuration may name."""

import yaml

from accordion_bench.options import conf_dir, instantiate
from tests.kit.paths import ROOT


def test_every_target_of_our_yaml_files_is_trusted_and_nothing_else():
    named = set()
    for file in (ROOT / "conf").rglob("*.yaml"):
        named |= {path for _, path in instantiate.targets_in(yaml.safe_load(file.read_text(encoding="utf-8")))}
    plain = {path for path in named if not path.startswith("${")}  # the others are values of a setup
    assert instantiate.trusted_targets() == plain
    assert not any(map(instantiate.is_trusted, ("os.system", "shared.run1.payload.X", "", None, 3, ["os.system"])))


def test_a_group_trusts_its_own_classes_only():
    assert instantiate.is_trusted("accordion_bench.schedules.learning_rate.Cosine", "schedule")
    assert not instantiate.is_trusted("accordion_bench.trackers.services.Wandb", "schedule")
    assert instantiate.is_trusted("accordion_bench.trackers.services.Wandb")


def test_a_folder_of_config_dir_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr(conf_dir, "_own", [])
    (tmp_path / "compressor").mkdir()
    text = "# _target_: mine.of.a.Comment\n_target_: 'mine.Sparse'  # mine\ninner: {_target_: mine.Inner}\n"
    (tmp_path / "compressor" / "mine.yaml").write_text(text, encoding="utf-8")
    assert not instantiate.is_trusted("mine.Sparse")
    conf_dir.add_conf_dir(str(tmp_path))
    assert instantiate.is_trusted("mine.Sparse", "compressor") and instantiate.is_trusted("mine.Inner")
    assert not instantiate.is_trusted("mine.of.a.Comment")


def test_what_a_command_names_is_trusted_for_it(monkeypatch):
    monkeypatch.setattr(instantiate, "_added", set())
    config = {"model": {"_target_": "a.B"}, "adaptive": {"x": {"inner": [{"_target_": "c.D"}, {"_target_": 3}]}}}
    found = [("model._target_", "a.B"), ("adaptive.x.inner._target_", "c.D"), ("adaptive.x.inner._target_", 3)]
    assert list(instantiate.targets_in(config)) == found
    assert instantiate.is_trusted("c.D", also=[path for _, path in found]) and not instantiate.is_trusted("c.D")
    instantiate.trust(config)
    assert instantiate.is_trusted("c.D", "compressor")
