"""Experiments of ALQ, dist-EF-blockSGD and local methods: they compose, are coherent at every scale, and train."""

import functools
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from accordion_bench import train
from accordion_bench.__main__ import in_order, main
from accordion_bench.cli import sweep
from accordion_bench.config import validate
from accordion_bench.config.components import build_components, build_model
from accordion_bench.config.compose import SCALES, compose, resolve
from accordion_bench.exchange.partition import sent_specs
from accordion_bench.options.conf_dir import conf_dir, read_yaml
from accordion_bench.plan import TensorSpec
from accordion_bench.run_config import RunConfig
from accordion_bench.runs import reuse
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed, tiny
from tests.kit.composed import parts_of, swept, unresolved
from tests.kit.helpers import yaml_names, yaml_node
from tests.kit.paths import ROOT

FAMILIES = ("alq", "ef_blocksgd", "local_sgd")
FILES = [f"{family}/{name}" for family in FAMILIES for name in yaml_names(f"experiment/{family}")]
PRESETS = [name for name in FILES if "experiment" in yaml_node("experiment", name).get("setup", {})]
OWN = {"alq": "alq", "ef_blocksgd": "ef_", "local_sgd": "local_"}  # how the names of a family's arms begin


@functools.cache
def cfg_of(preset: str, arm: str = "dense", at: str = "full", **setup) -> dict:
    """The configuration of one cell, with some of what arms read replaced; not to be changed."""
    full = unresolved(preset, arm).copy()
    with open_dict(full):
        full.scale = at
        full.setup = OmegaConf.merge(full.setup, setup)
    return resolve(full, full.hydra.runtime.choices)


@functools.cache
def stated(file: str) -> dict[str, str]:
    """What an experiment's file and those that it begins with sweep over: for lists of cases, without Hydra."""
    node = read_yaml(conf_dir() / "experiment" / f"{file}.yaml")
    begins = [str(item).removeprefix("/experiment/") for item in node["defaults"] if "/experiment/" in str(item)]
    before = {key: value for base in begins for key, value in stated(base).items()}
    return before | node.get("hydra", {}).get("sweeper", {}).get("params", {})


def arms_in(preset: str) -> list[str]:
    """The arms that an experiment's file states; `test_a_preset_is_a_whole_sweep` composes it."""
    return stated(preset)["+arm"].split(",")


def arms_of(family: str) -> list[str]:
    """All arms that the family's presets use."""
    return sorted({arm for preset in PRESETS if preset.startswith(family) for arm in arms_in(preset)})


def test_nothing_lies_idle():
    """Every file is an experiment or a part of one; every arm of these families is in an experiment."""
    parts = {name for name in FILES if Path(name).name.startswith("base")} | {"alq/official"}
    assert set(FILES) == set(PRESETS) | parts
    for family, prefix in OWN.items():
        own = {name for name in yaml_names("arm") if name.startswith(prefix)}
        assert own | {"dense", "dense_fp16"} == set(arms_of(family)) | {"dense_fp16"}


@pytest.mark.sample(5)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_whole_sweep(preset):
    full = unresolved(preset, "dense")
    assert full.hydra.mode == RunMode.MULTIRUN and full.setup.experiment == preset
    for at in SCALES:
        params = swept(preset, at)
        assert next(iter(params)) == "+experiment"  # else arms would come before their experiment
        assert params["+arm"] == arms_in(preset) and set(params) == set(stated(preset))
        assert "dense" in params["+arm"] and set(params["+arm"]) <= set(yaml_names("arm"))
        assert params["seed"] == [str(seed) for seed in range(len(params["seed"]))]
    assert len(swept(preset)["seed"]) >= 3 and len(swept(preset, "tiny")["seed"]) == 1


@pytest.mark.sample(5)
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_coherent_at_every_scale(preset):
    """Shares of the run stay, learning rates follow the batch; less and less is trained on."""
    whole, trained_on = cfg_of(preset), float("inf")
    for at in SCALES:
        cfg = cfg_of(preset, at=at)
        parts = parts_of(cfg)
        cuts, epochs = getattr(parts.schedule, "milestones", []), cfg["epochs"]
        share = cfg["batch_size"] / whole["batch_size"]
        if not preset.startswith("alq") and cfg["choices"]["optimizer"] == "sgd":
            assert cfg["optimizer"]["lr"] == pytest.approx(whole["optimizer"]["lr"] * share)
        originals = getattr(parts_of(whole).schedule, "milestones", [])
        for cut, original in zip(cuts, originals, strict=True):
            assert abs(cut / epochs - original / whole["epochs"]) <= 0.125
        assert cuts == sorted(cuts) and (not cuts or 0 < cuts[0] < epochs)
        assert parts.schedule.rises_until <= (cuts[0] if cuts else epochs / 4)
        assert parts.run.steps_per_epoch() >= 2
        size = epochs * parts.run.train_size
        assert size < trained_on / 5 and (at == "full" or cfg["dataset"]["limit_eval"])
        trained_on = size


LOCAL = [preset for preset in PRESETS if preset.startswith("local_sgd")]


@pytest.mark.sample(5)
@pytest.mark.parametrize("preset", LOCAL)
def test_workers_meet_in_mid_run_at_every_scale(preset):
    """The longest period fits into the steps after the switch."""
    for at in SCALES:
        cfg, params, setup = cfg_of(preset, at=at), swept(preset, at), unresolved(preset, "dense").copy()
        setup.scale = at
        for workers in map(int, params.get("workers", [cfg["workers"]])):
            run = build_components(RunConfig.from_dict({**cfg, "workers": workers}), workers).run
            switch = (run.first_drop() or 0) if "local_post" in params["+arm"] else 0
            longest = max(map(int, params.get("setup.period", [setup.setup.period])))
            assert (run.epochs - switch) * run.steps_per_epoch() >= longest


@pytest.mark.sample(5)
@pytest.mark.parametrize("preset", PRESETS)
def test_arms_find_what_they_read(preset):
    """Every `setup` key of an arm is in every experiment that has the arm."""
    there = set(unresolved(preset, "dense").setup)
    for arm in arms_in(preset):
        text = (conf_dir() / "arm" / f"{arm}.yaml").read_text()
        assert set(re.findall(r"\$\{setup\.(\w+)\}", text)) <= there, (preset, arm)


SOME = [(family, arm) for family in FAMILIES for arm in arms_of(family)]


def home(family: str, arm: str) -> str:
    """The family's first preset with this arm."""
    return next(preset for preset in PRESETS if preset.startswith(family) and arm in arms_in(preset))


def check_cell(preset: str, arm: str, monkeypatch) -> None:
    """Validated at tiny, put together at the other scales; the network is tests/models/test_models.py's to build."""
    monkeypatch.setattr(
        validate, "build_model", lambda *_: torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(2)))
    )
    cfg = cfg_of(preset, arm, "tiny")
    composed.validated(cfg)
    assert (cfg["choices"]["experiment"], cfg["choices"]["arm"]) == (preset, arm)
    for at in ("full", "small"):
        parts_of(cfg_of(preset, arm, at))


@pytest.mark.sample(7)
@pytest.mark.parametrize("family, arm", SOME)
def test_an_arm_is_valid(family, arm, monkeypatch):
    check_cell(home(family, arm), arm, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_every_cell_is_valid(preset, monkeypatch):
    for arm in swept(preset)["+arm"]:
        check_cell(preset, arm, monkeypatch)


@pytest.mark.sample(3)
@pytest.mark.parametrize("preset", [preset for preset in PRESETS if any("setup." in key for key in stated(preset))])
def test_what_is_swept_is_read(preset):
    """The option changes the family's own arm, and leaves dense as it is, which therefore trains once."""
    (key,) = (key for key in swept(preset) if key.startswith("setup."))
    option, values = key.removeprefix("setup."), swept(preset)[key]
    arm = {"alq": "alq_nuqsgd", "local_sgd": "local_sgd"}[preset.partition("/")[0]]
    for name, kinds in ((arm, len(values)), ("dense", 1)):
        found = [reuse.decisive(cfg_of(preset, name, **{option: int(value)})) for value in values]
        assert sum(one not in found[:i] for i, one in enumerate(found)) == kinds


# ---- the sources' set-ups, at full scale


def test_alq():
    """80,000 steps whatever the number of workers, cut after 40,000 and 60,000, with one worker's learning rate."""
    for preset, model in {"alq/table1": "resnet32", "alq/table2": "resnet110", "alq/bits": "resnet8"}.items():
        run = parts_of(cfg_of(preset)).run
        assert cfg_of(preset)["choices"]["model"] == model and run.workers * run.batch_size == 512
        assert run.steps_per_epoch() == 98 and run.steps == pytest.approx(80_000, rel=1e-3)
        assert [98 * cut for cut in run.schedule.milestones] == pytest.approx([40_000, 60_000], rel=1e-3)
        assert sorted({run.schedule(epoch) for epoch in range(run.epochs)}) == pytest.approx([0.01, 0.1, 1])
    alone = parts_of(cfg_of("alq/table1", "alq_one_worker")).run
    assert alone.workers * alone.batch_size == 128 and alone.steps == pytest.approx(80_000, rel=3e-3)
    assert (swept("alq/table1")["setup.bucket_size"], unresolved("alq/table2", "dense").setup.bucket_size) == (
        ["8192", "16384"],
        16384,
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("arm", ["alq", "alq_n", "alq_amq", "alq_amq_n", "alq_nuqsgd", "alq_qsgdinf"])
def test_official_quirks_of_alq(arm):
    official = yaml_node("experiment/alq", "official")["setup"]
    ours, theirs = cfg_of("alq/table1", arm), cfg_of.__wrapped__("alq/table1", arm, **official)
    assert theirs["choices"]["experiment"] == "alq/table1, faithful"
    assert (ours["compressor"]["zero_level"], theirs["compressor"]["zero_level"]) == (True, False)
    for node, other in zip(ours["adaptive"].values(), theirs["adaptive"].values(), strict=True):
        assert (node["solver"], other["solver"]) == ("exact", "official")
        assert other["norm_weight"] == ("first" if node["fit"] == "mixture" else "squared")
    parts_of(theirs)


def test_quirks_of_alq_in_any_order():
    both = ["alq/table2", "alq/official"]
    found = [compose([f"+experiment=[{','.join(order)}]", "+arm=alq"]) for order in (both, both[::-1])]
    assert found[0] == found[1] and found[0]["adaptive"]["alq"]["solver"] == "official"


def test_ef_blocksgd():
    """256 images per step at 0.1, ImageNet with 7 workers at 0.35; who has momentum, and how many scales."""
    small, large = parts_of(cfg_of("ef_blocksgd/cifar100")).run, parts_of(cfg_of("ef_blocksgd/imagenet")).run
    assert (small.workers, small.batch_size, small.epochs) == (8, 32, 200) and small.schedule.milestones == [100, 150]
    assert small.schedule(0) == 1 and cfg_of("ef_blocksgd/cifar100")["optimizer"]["lr"] == 0.1
    assert (large.workers, large.batch_size, large.epochs) == (7, 128, 90) and large.schedule.milestones == [30, 60]
    assert 0.05 * large.schedule(5) == pytest.approx(0.35)
    momentum = {arm: cfg_of("ef_blocksgd/cifar100", arm)["optimizer"] for arm in arms_of("ef_blocksgd")}
    plain = {"ef_dense_plain", "ef_sgd", "ef_blocksgd", "ef_signsgd"}
    assert {arm for arm, node in momentum.items() if not node["momentum"] and not node["nesterov"]} == plain
    assert {arm for arm, node in momentum.items() if node["momentum"] and node["nesterov"]} == set(momentum) - plain
    for arm, scales in {"ef_sgd": 1, "ef_sgdm": 1, "ef_blocksgd": 59, "ef_blocksgdm": 59}.items():
        cfg = cfg_of("ef_blocksgd/cifar100", arm, "tiny")
        parts = parts_of(cfg)
        named = build_model(cfg["model"], parts.dataset).named_parameters()
        specs = [TensorSpec(name, tuple(p.shape)) for name, p in named]
        assert len(sent_specs(specs, parts.wrapped.scope, parts.wrapped.block_size)) == scales


def test_local_sgd():
    """0.1 for 64 (or 128, 256) images, scaled with the workers; decays at 150 and 225, or 30, 60 and 80."""
    peaks = {  # peak learning rate, samples per step, milestones
        "local_sgd/cifar": (3.2, 2048, [150, 225]),
        "local_sgd/imagenet": (1.6, 4096, [30, 60, 80]),
        "local_sgd/slowmo_cifar10": (3.2, 4096, [100, 150, 175]),
        "local_sgd/slowmo_imagenet": (3.2, 8192, [30, 60, 80]),
    }
    for preset, (peak, batch, cuts) in peaks.items():
        cfg = cfg_of(preset)
        run = parts_of(cfg).run
        assert run.workers * run.batch_size == batch and run.schedule.milestones == cuts
        assert cfg["optimizer"]["lr"] * run.schedule(5) == pytest.approx(peak)
    assert swept("local_sgd/cifar")["setup.period"] == ["1", "2", "4", "8", "16", "32"]
    assert (
        swept("local_sgd/cifar_workers")["workers"]
        == swept("local_sgd/imagenet_workers")["workers"]
        == ["4", "8", "16"]
    )


@pytest.mark.parametrize("name", ["diloco", "muloco"])
@pytest.mark.parametrize("at", SCALES)
def test_the_control_of_diloco_sees_as_many_samples(at, name):
    """One worker with the batch of all: the same steps, and the same outer ones."""
    many, one = (cfg_of(f"local_sgd/{name}", arm, at) for arm in (f"local_{name}", f"local_{name}_one_worker"))
    assert one["workers"] == 1 and one["batch_size"] == many["workers"] * many["batch_size"]
    assert parts_of(one).run.steps == parts_of(many).run.steps and one["sync"] == many["sync"]
    assert one["optimizer"] == many["optimizer"]


@pytest.mark.sample(4)
@pytest.mark.parametrize("preset, arm, every_step", [
    ("gpt/diloco", "local_diloco", "dense_bf16"), ("gpt/streaming", "local_diloco", "dense_bf16"),
    ("gpt/streaming", "gpt_streaming", "dense_bf16"), ("gpt/sparseloco", "gpt_sparseloco", "dense_bf16"),
    ("gpt/muloco", "gpt_muloco", "gpt_muon"),
])  # fmt: skip
@pytest.mark.parametrize("at", SCALES)
def test_arms_of_transformers_see_as_many_bytes(at, preset, arm, every_step):
    """Dense, local and alone: as many steps on as many windows, with the same optimizer."""
    many, one, dense = (cfg_of(preset, name, at) for name in (arm, f"{arm}_one_worker", every_step))
    assert one["workers"] == 1 and one["batch_size"] == many["workers"] * many["batch_size"]
    assert len({parts_of(cfg).run.steps for cfg in (many, one, dense)}) == 1 and one["sync"] == many["sync"]
    assert one["optimizer"] == many["optimizer"] == dense["optimizer"]
    assert cfg_of(preset, "dense_bf16", at)["compressor"]["dtype"] == "bfloat16"
    assert many["sync"]["period"] < parts_of(many).run.steps
    assert {arm, f"{arm}_one_worker", "dense", "dense_bf16"} <= set(swept(preset, at)["+arm"])


# ---- in training

QUICK = ["model=resnet8", "dataset=digits", "scale=tiny", "comm=simulated"]


def test_the_variance_is_recorded(tmp_path):
    """compression_error per epoch: nothing for dense, and NUQSGD's is larger than QSGDinf's in buckets of 8192."""
    found = {}
    for arm in ("dense", "alq_qsgdinf", "alq_nuqsgd"):
        runs = tmp_path / arm
        train.run(compose(["+experiment=alq/variance", f"+arm={arm}", f"paths.runs={runs}", *QUICK]))
        found[arm] = [row["compression_error"] for row in RunFolder(tiny.only(runs)).read_metrics()]
    assert not any(found["dense"]) and len(found["dense"]) == 4
    assert all(0 < ours < theirs for ours, theirs in zip(found["alq_qsgdinf"], found["alq_nuqsgd"], strict=True))


def test_arms_may_be_typed_before_their_experiment():
    typed = ["-m", "+arm=alq_one_worker", "workers=2", "+experiment=alq/table1", "seed=1"]
    assert in_order(typed) == ["-m", "workers=2", "+experiment=alq/table1", "seed=1", "+arm=alq_one_worker"]
    assert compose(in_order(["+arm=alq_one_worker", "+experiment=alq/table1"]))["workers"] == 1


def test_equal_cells_train_once_and_arms_have_the_last_word(tmp_path, monkeypatch):
    """One worker knows nothing of buckets, and stays alone though the experiment says four."""
    typed = ["+experiment=alq/table1", "scale=tiny", f"paths.runs={tmp_path}", "epochs=1", "setup.bucket_size=64,128"]
    quick = [word for word in QUICK if "scale" not in word]
    monkeypatch.setattr(sys, "argv", ["accordion_bench", *typed, *quick, "+arm=alq_one_worker,alq_trn"])
    monkeypatch.setattr(sweep, "current", sweep.Sweep())
    main()
    lines = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["done", "skipped", "done", "done"]
    assert lines[0]["folder"] == lines[1]["folder"]
    configs = [RunFolder(line["folder"]).read_config() for line in lines]
    assert [cfg["workers"] for cfg in configs] == [1, 1, 4, 4]
    assert [cfg["choices"]["arm"] for cfg in configs] == ["alq_one_worker"] * 2 + ["alq_trn"] * 2
    assert [cfg["compressor"].get("bucket_size") for cfg in configs] == [None, None, 64, 128]
    assert not any("setup" in cfg for cfg in configs)


def run_preset(preset: str, runs: Path, *overrides: str) -> list[dict]:
    """Lines of the record of a preset that has come to its end, from the command line."""
    command = [*tiny.COMMAND, f"+experiment={preset}", "scale=tiny", f"paths.runs={runs}", *overrides]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (runs / "sweep.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["alq/table1", "ef_blocksgd/cifar100", "local_sgd/cifar", "local_sgd/diloco"])
def test_a_preset_trains(tmp_path, preset):
    """All arms at scale=tiny, with a small network on images that need no file."""
    params = swept(preset, "tiny")
    cells = len(list(itertools.product(*params.values())))
    lines = run_preset(preset, tmp_path, "model=resnet8", "dataset=digits")
    assert len(lines) == cells
    done = [RunFolder(line["folder"]) for line in lines if line["status"] == "done"]
    assert {folder.read_config()["choices"]["arm"] for folder in done} == set(params["+arm"])
    assert all(folder.done for folder in done)
