"""The methods that advice looks at: found by their files, spelled as in reports, and what to type for each."""

import re

import pytest

from accordion_bench.advising.arms import arm_of, considered
from accordion_bench.options import conf_dir
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import yaml_files
from tests.kit import composed

ARMS = considered()


def test_every_compressor_and_every_local_scheme_is_there():
    compressors = {typed.removeprefix("compressor=") for arm in ARMS for typed in arm.overrides[:1]}
    assert set(yaml_files("compressor")) <= compressors
    schemes = {arm.chosen.sync_name for arm in ARMS}
    assert schemes == set(yaml_files("sync")) - {"drawn_times"}  # synchronous steps, of which all gradients are sent
    assert [arm.overrides for arm in ARMS[:2]] == [("compressor=none",), ("compressor=bf16",)]
    assert all(arm.chosen.compressor_name == "none" for arm in ARMS if arm.chosen.sync_name != "every_step")


def test_names_are_those_of_reports_and_all_differ():
    names = [arm.name for arm in ARMS]
    assert len(set(names)) == len(names)
    assert {"dense", "bf16", "PowerSGD rank 4", "TopK 0.1 %", "Signum", "DiLoCo", "local SGD", "SlowMo"} <= set(names)


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_what_is_typed_is_what_was_chosen(arm):
    cfg = composed.cfg(*arm.overrides)
    assert cfg["compressor"] == arm.chosen.compressor
    assert cfg["optimizer"] == arm.chosen.optimizer
    assert {**cfg["sync"], "period": 0} == {**arm.chosen.sync, "period": 0}
    assert arm.chosen.sync.get("period") in (1, None)


def test_options_are_typed_with_their_group():
    arm = arm_of("topk", "diloco", {"density": 0.02})
    assert arm.overrides == ("sync=diloco", "compressor=topk", "compressor.density=0.02")
    assert arm.name == "DiLoCo, TopK 2 %"
    with pytest.raises(ConfigError, match=r"compressor\.topk\.rank is no option"):
        arm_of("topk", options={"rank": 2})
    with pytest.raises(ConfigError, match="compressor must be a known name, got 'topq'; pass compressor='topk'"):
        arm_of("topq")


def test_the_optimizer_that_was_given_is_kept():
    adamw = {"_target_": "torch.optim.AdamW", "lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.01}
    arms = [arm for arm in considered(adamw) if arm.chosen.compressor_name != "lion"]  # which needs optimizer=lion
    assert all(arm.chosen.optimizer == {**adamw, "lr": arm.chosen.optimizer["lr"]} for arm in arms)


def test_two_files_from_outside_are_looked_at(tmp_path, monkeypatch):
    (tmp_path / "compressor").mkdir()
    (tmp_path / "looked_at.py").write_text(
        "from dataclasses import replace\n\nfrom accordion_bench.compressors.uncoded import Dense\n\n\n"
        'class Outside(Dense):\n    traits = replace(Dense.traits, knob="strength")\n'
        "    description = replace(Dense.description, advised_levels=(1, 5),\n"
        '        requires={"optimizer": {"momentum": 0.0}})\n\n'
        "    def __init__(self, strength=2):\n        self.strength = strength\n"
    )
    (tmp_path / "compressor" / "outside.yaml").write_text("_target_: looked_at.Outside\nstrength: 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(conf_dir, "_own", [tmp_path])
    found = [arm for arm in considered() if arm.chosen.compressor_name == "outside"]
    strengths = [[typed for typed in arm.overrides if "strength" in typed] for arm in found]
    assert strengths == [[], ["compressor.strength=1"], ["compressor.strength=5"]]
    assert all(arm.overrides[-1] == "optimizer.momentum=0.0" for arm in found)
    assert all(arm.chosen.optimizer["momentum"] == 0 for arm in found)
    assert [re.sub(r"\D", "", arm.name) for arm in found] == ["2", "1", "5"]
