"""+experiment=gpt/lowrank: a whole sweep, whose arms compose at every scale and train."""

import pytest

from accordion_bench import train
from accordion_bench.cli import smoke
from accordion_bench.config.compose import SCALES, resolve
from accordion_bench.methods.labels import label
from tests.kit.composed import swept, unresolved

PRESET = "gpt/lowrank"
ARMS = {
    "dense": "dense",
    "dense_bf16": "bf16",
    "lowrank_powersgd": "PowerSGD rank 4",
    "lowrank_acpsgd": "ACP-SGD rank 4",
    "lowrank_dion": "Dion rank 16",
}


def cfg_of(arm: str, at: str = "full") -> dict:
    full = unresolved(PRESET, arm).copy()
    full.scale = at
    return resolve(full, full.hydra.runtime.choices)


def test_it_is_a_whole_sweep():
    for at in SCALES:
        params = swept(PRESET, at)
        assert next(iter(params)) == "+experiment" and params["+arm"] == list(ARMS)
    assert swept(PRESET)["seed"] == ["0", "1", "2"]


@pytest.mark.parametrize("arm", ARMS)
def test_arms_differ_by_the_compressor_alone(arm):
    dense = cfg_of("dense")
    for at in SCALES:
        cfg = cfg_of(arm, at)
        assert label(cfg) == ARMS[arm] and smoke.refusal(cfg, 4) is None
    cfg = cfg_of(arm)
    differ = {key for key in cfg if cfg[key] != dense[key]}
    assert differ <= {"compressor", "choices"} and cfg["optimizer"] == dense["optimizer"]


@pytest.mark.parametrize("arm", [pytest.param(arm, marks=[pytest.mark.slow] * (arm != "lowrank_dion")) for arm in ARMS])
def test_arms_train(tmp_path, arm):
    cfg = cfg_of(arm, "tiny")
    cfg["paths"]["runs"] = str(tmp_path)
    assert 0 < train.run(cfg) < 8.5  # bits per byte
