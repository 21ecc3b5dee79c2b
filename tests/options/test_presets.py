"""A preset's name does not survive an override, wherever it would tell a wrong thing."""

import pytest

from accordion_bench.methods.labels import label
from accordion_bench.network.links import link_name
from accordion_bench.options.conf_dir import yaml_files
from accordion_bench.options.presets import named, overridden, preset_of
from tests.kit import composed

GROUPS = ("model", "dataset", "compressor", "sync", "network")


@pytest.mark.parametrize("group", GROUPS)
def test_every_choice_as_it_stands_keeps_its_name(group):
    for name in yaml_files(group):
        if name != "custom":
            cfg = composed.cfg(f"{group}={name}")
            assert named(cfg, group) == name and overridden(group, name, cfg[group]) == {}
            assert preset_of(group, name, cfg[group]) == (name, {})


def test_every_policy_as_it_stands_keeps_its_name():
    for name in set(yaml_files("adaptive")) - {"none", "advised"}:
        for key, node in composed.cfg(f"adaptive={name}")["adaptive"].items():
            assert preset_of("adaptive", key, node) == (key, {})


@pytest.mark.parametrize(
    ("typed", "group", "name"),
    [
        (["model=vgg19", "model.width=8"], "model", "vgg19 (width=8)"),
        (["model=lstm_small", "dataset=synthetic_text", "model.hidden=64"], "model", "lstm_small (hidden=64)"),
        (["dataset=synthetic", "dataset.train_size=640"], "dataset", "synthetic (train_size=640)"),
        (["compressor=powersgd", "compressor.rank=4"], "compressor", "powersgd (rank=4)"),
        (["sync=diloco", "sync.outer_lr=0.3"], "sync", "diloco (outer_lr=0.3)"),
        (["optimizer.momentum=0.8"], "optimizer", "sgd (momentum=0.8)"),
        (["schedule=cosine", "schedule.warmup_epochs=0.5"], "schedule", "cosine (warmup_epochs=0.5)"),
    ],
)
def test_options_stand_beside_the_name(typed, group, name):
    assert named(composed.cfg(*typed), group) == name


def test_options_that_are_told_elsewhere_are_left_out():
    cfg = composed.cfg("model=vgg19", "model.width=8", "dataset.validation=100")
    assert named(cfg, "dataset") == "digits (validation=100)" and named(cfg, "dataset", ("validation",)) == "digits"


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        (["network=10gbit"], "10gbit"),
        (["network.bandwidth=5gbit"], "5 Gbit/s and 50 µs per round"),
        (["network.bandwidth=1gbit"], "1gbit"),  # as it stands there
        (["network.latency=1ms"], "1 Gbit/s and 1000 µs per round"),
        (["network=custom", "network.bandwidth=20mbit"], "20 Mbit/s and 50 µs per round"),
        (["network.jitter=100us"], "1 Gbit/s and 50 µs per round, 100 µs of jitter"),
        (
            ["network=10gbit", "network.workers_per_machine=4", "network.inside=pcie4"],
            "10 Gbit/s and 20 µs per round, machines of 4 workers over pcie4",
        ),
    ],
)
def test_links(typed, name):
    assert link_name(composed.cfg(*typed)) == name


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["compressor=bf16", "compressor.dtype=float16"], "fp16"),
        (["compressor=int8", "compressor.format=e4m3"], "fp8"),
        (["compressor=fp8", "compressor.format=e5m2"], "fp8 (format=e5m2)"),
        (["compressor=efsignsgd", "compressor.error_feedback=false"], "EF-signSGD (error_feedback=false)"),
        (["compressor=efsignsgd", "compressor.collective=two_way"], "EF-signSGD (collective=two_way)"),
        (["compressor=qsgdinf", "compressor.norm=2"], "QSGDinf 4 bits (norm=2)"),
        (["compressor=topk", "compressor.error_feedback=ef21"], "TopK 10 %, EF21"),
        (["compressor=powersgd", "compressor.rank=8"], "PowerSGD rank 8"),
        (["compressor=qsgd", "compressor.bits=2", "compressor.bucket_size=64"], "QSGD 2 bits"),
        (["sync=local_sgd", "sync.switch_step=10"], "local SGD (switch_step=10), H 8"),
        (["sync=diloco", "sync.outer_lr=0.3"], "DiLoCo, H 30"),
    ],
)
def test_labels_name_what_the_options_make_of_a_method(typed, told):
    assert label(composed.cfg(*typed)) == told


def test_a_choice_that_has_no_file_keeps_its_name():
    """Of a folder from somewhere else: nobody knows what its options were."""
    cfg = {"choices": {"model": "mine", "network": "theirs"}, "model": {"width": 3}, "network": {}}
    assert named(cfg, "model") == "mine" and link_name(cfg) == "theirs"
    assert preset_of("compressor", "mine", {"_target_": "theirs.Mine", "rank": 2}) == ("mine", {})
