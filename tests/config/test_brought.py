"""What a choice brings for other groups gives way to all that is typed, and every door sees the same values."""

import pytest

from accordion_bench import train
from accordion_bench.cli import smoke
from accordion_bench.config.compose import compose
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import conf_dir, options_of, plain, read_yaml
from accordion_bench.run_config import GROUPS
from accordion_bench.runs.folder import RunFolder
from tests.kit import composed, tiny
from tests.kit.helpers import yaml_names

SLOWMO = "sync=slowmo brings optimizer.nesterov=true"


def optimizer(*overrides: str) -> dict:
    return compose(overrides)["optimizer"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "choice", ["compressor=distefblocksgd", "sync=slowmo", "adaptive=slowmo", "sync=local_sgd", "adaptive=qsr"]
)
def test_the_papers_momentum_comes_with_the_method(choice):
    assert optimizer(choice)["nesterov"] is True


def test_what_is_typed_wins():
    assert optimizer()["nesterov"] is False
    assert optimizer("sync=slowmo", "optimizer.nesterov=false")["nesterov"] is False
    assert optimizer("sync=slowmo", "optimizer.momentum=0") | {"lr": 0} == optimizer("optimizer.momentum=0") | {"lr": 0}


@pytest.mark.sample(3)
@pytest.mark.parametrize("choice", ["compressor=signsgd", "compressor=signum", "compressor=demo"])
def test_a_step_that_is_a_sign_has_a_rate_of_its_own(choice):
    cfg, typed = compose([choice]), compose([choice, "optimizer.lr=0.02", "schedule.lr_scaling=linear"])
    assert (cfg["optimizer"]["lr"], cfg["schedule"]["lr_scaling"]) == (1e-3, "sqrt")
    assert (typed["optimizer"]["lr"], typed["schedule"]["lr_scaling"]) == (0.02, "linear")


@pytest.mark.sample(3)
@pytest.mark.parametrize("schedule", ["multistep", "cosine", "constant"])
def test_adamw_does_not_inherit_linear_scaling(schedule):
    assert compose([f"schedule={schedule}"])["schedule"]["lr_scaling"] == "linear"
    assert compose(["optimizer=adamw", f"schedule={schedule}"])["schedule"]["lr_scaling"] == "sqrt"


SLOW = ["signum", "demo", "onebit", "efsignsgd", "distefblocksgd"]


@pytest.mark.parametrize("name", ["signsgd", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_it_learns_as_it_is_typed(name, tmp_path):
    """At the rate of SGD, 0.4 with 4 workers, the first three end at 0.10, which is chance."""
    options = ["dataset=digits", "dataset.subset=512", "dataset.limit_eval=128", "epochs=4", "schedule.warmup_epochs=1"]
    metric = train.run(compose([f"compressor={name}", *options, "comm=simulated", f"paths.runs={tmp_path}"]))
    assert metric > 0.5


def test_an_optimizer_without_the_option_is_left_alone():
    assert "nesterov" not in optimizer("sync=slowmo", "optimizer=adamw")


def test_what_an_experiment_says_wins():
    preset = ["+experiment=ef_blocksgd/cifar100", "scale=tiny"]
    assert optimizer(*preset, "+arm=ef_blocksgd")["momentum"] == 0
    cfg = compose(["+experiment=accordion/table1_resnet18", "scale=tiny", "+arm=dense", "sync=slowmo"])
    assert cfg["optimizer"]["nesterov"] is False and "brought" not in cfg["choices"]


def test_a_default_momentum_gives_way_to_demo_and_a_typed_one_is_refused():
    cfg = compose(["compressor=demo"])
    assert cfg["optimizer"]["momentum"] == 0
    composed.validated(cfg)
    with pytest.raises(ConfigError, match=r"^optimizer\.momentum must be 0, .* got 0.9; type optimizer\.momentum=0$"):
        composed.validated(compose(["compressor=demo", "optimizer.momentum=0.9"]))


FILES = sorted(file for group in GROUPS for file in (conf_dir() / group).glob("*.yaml"))
FILES = [file for file in FILES if "brings:" in file.read_text() or "${" in file.read_text()]


@pytest.mark.sample(5)
@pytest.mark.parametrize("file", FILES, ids=[f"{file.parent.name}={file.stem}" for file in FILES])
def test_nothing_of_it_is_left_in_the_configuration(file):
    """Neither `brings` nor `${brought:...}`: what is resolved is what is saved."""
    assert len(FILES) > 5
    text = str(compose([f"{file.parent.name}={file.stem}"]) | {"choices": {}})
    assert "'brings'" not in text and "${" not in text


def test_what_is_brought_is_an_option_with_a_default_that_may_give_way():
    """Else it would be silently left out."""
    for group in GROUPS:
        for name in yaml_names(group):
            for other, options in read_yaml(conf_dir() / group / f"{name}.yaml").get("brings", {}).items():
                files = [read_yaml(conf_dir() / other / f"{choice}.yaml") for choice in yaml_names(other)]
                for key in options:
                    assert any(plain(file.get(key)) != file.get(key) for file in files), f"{group}={name}: {key}"
                    kinds = {type(options_of(file)[key]) for file in files if key in file}
                    assert type(options[key]) in kinds


def test_the_header_and_the_folder_say_so_and_a_resumed_run_keeps_it(tmp_path, capsys):
    cfg = compose(tiny.typed(tmp_path, "sync=slowmo", "sync.period=2", "epochs=2", "checkpoint.every=2"))
    train.run(cfg, {"sync": "slowmo"})
    assert f"; {SLOWMO}" in capsys.readouterr().out.splitlines()[0]
    folder = RunFolder(tiny.only(tmp_path))
    saved = folder.read_config()
    assert saved["optimizer"]["nesterov"] is True and saved["choices"]["brought"] == SLOWMO
    (folder.path / "done").unlink()
    again = train.resumed_config(compose([f"resume={folder.path}", "model._target_=tests.kit.tiny.Net"]), {"resume"})
    assert again["optimizer"] == saved["optimizer"] and again["choices"]["brought"] == SLOWMO


def test_cells_of_the_smoke_test_have_it_too():
    base = compose(["+experiment=smoke"])
    cell = smoke.composed_cell(base, "none", "slowmo", [])
    assert cell["optimizer"]["nesterov"] is True and cell["choices"]["brought"] == SLOWMO
    assert smoke.composed_cell(base, "demo", "every_step", [])["optimizer"]["momentum"] == 0
