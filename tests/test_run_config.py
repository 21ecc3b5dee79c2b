"""The typed configuration: declared once, and the same in the YAML files, in a run and in its folder."""

import ast
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import get_args, get_origin, get_type_hints

import pytest
import yaml

from accordion_bench.config.value_checks import check_kinds
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import conf_dir, package_dir
from accordion_bench.run_config import GROUPS, PARTS, CommConfig, RunConfig, completed, defaults
from accordion_bench.runs.folder import RunFolder
from tests.cli.test_experiments import PRESETS, cfg_of
from tests.kit import composed
from tests.kit.composed import swept
from tests.kit.helpers import yaml_names, yaml_node

CHOICES = [(f"{group}={name}", group, name) for group in (*GROUPS, "comm") for name in yaml_names(group)]
ROOT = yaml.safe_load((conf_dir() / "config.yaml").read_text())
RUN_LEVEL = {key: value for key, value in ROOT.items() if key not in ("defaults", "hydra")}


def same(cfg: dict) -> None:
    """There and back: equal, and in the same order at every level."""
    back = RunConfig.from_dict(cfg).to_dict()
    assert back == cfg
    assert yaml.safe_dump(back, sort_keys=False) == yaml.safe_dump(cfg, sort_keys=False)


@pytest.mark.sample(5)
@pytest.mark.parametrize("choice, group, name", CHOICES, ids=[choice for choice, _, _ in CHOICES])
def test_there_and_back_for_every_choice(choice, group, name):
    cfg, node = composed.cfg(), yaml_node(group, name) or {}
    if group == "adaptive":
        node = {name: node}
    same({**cfg, group: node})


# one of each family, and all of them
FIRST = {preset.partition("/")[0]: preset for preset in reversed(PRESETS)}.values()


@pytest.mark.parametrize(
    "preset", [preset if preset in FIRST else pytest.param(preset, marks=pytest.mark.slow) for preset in PRESETS]
)
def test_there_and_back_for_every_experiment(preset):
    cfg = cfg_of(preset, swept(preset)["+arm"][0], "tiny")
    same(cfg)
    check_kinds(RunConfig.from_dict(cfg))


def test_there_and_back_through_a_run_folder(tmp_path):
    cfg = composed.cfg("compressor=powersgd", "adaptive=[accordion,accordion_sync]")
    folder = RunFolder.create(str(tmp_path), "x", RunConfig.from_dict(cfg).to_dict())
    same(folder.read_config())
    assert folder.read_config() == cfg


# ---- one declaration


def test_run_level_is_what_the_yaml_says():
    comm = defaults().pop("comm")
    declared = {key: value for key, value in defaults().items() if key != "comm"}
    assert declared == RUN_LEVEL and list(declared) == list(RUN_LEVEL)
    groups = [group for entry in ROOT["defaults"] if isinstance(entry, dict) for group in entry]
    assert sorted((*GROUPS, "comm")) == sorted(group for group in groups if not group.startswith("override"))
    for name in yaml_names("comm"):
        node = yaml_node("comm", name)
        assert node == {**comm, "backend": name} and list(node) == list(comm)


@pytest.mark.parametrize("part", [RunConfig, *PARTS.values()], ids=lambda part: part.__name__)
def test_defaults_are_of_the_kind_that_is_declared(part):
    """What YAML says null for may be null; nothing else may."""
    hints = get_type_hints(part)
    given = {own.name: own for own in fields(part) if own.name not in (*GROUPS, *PARTS, "choices")}
    for name, own in given.items():
        kinds = get_args(hints[name]) if isinstance(hints[name], UnionType) else (hints[name],)
        plain = tuple(get_origin(kind) or kind for kind in kinds)
        accepted = (*plain, int) if float in plain else plain
        assert isinstance(own.default, accepted) and (own.default is None) == (type(None) in kinds), name


def test_one_alias_for_a_plain_configuration():
    """Defined in options/conf_dir.py, and nowhere anew."""
    found = []
    for file in sorted(package_dir().rglob("*.py")):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if "Config = " in text else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "Config":
                found.append((file.relative_to(package_dir()), ast.unparse(node.value)))
    assert found == [(Path("options/conf_dir.py"), "dict[str, Any]")]


# ---- what is refused, and what older folders lack


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda cfg: cfg.pop("epochs"), "epochs must be there, got ~epochs; type epochs=60"),
        (lambda cfg: cfg.pop("compressor"), "compressor must be there, got ~compressor; type compressor=NAME"),
        (lambda cfg: cfg["comm"].pop("engine"), "comm.engine must be there, got ~.*; type comm.engine=exchange"),
        (lambda cfg: cfg.update(epocs=3), "epocs is no option here; type epochs, or --help"),
        (lambda cfg: cfg["measure"].update(norm=True), "measure.norm is no option here; type measure.norms"),
        (lambda cfg: cfg.update(paths="x"), "paths must be a group of options, got x; type paths.data=VALUE"),
    ],
)  # fmt: skip
def test_names_are_refused_at_the_door(change, told):
    cfg = composed.cfg()
    change(cfg)
    with pytest.raises(ConfigError, match=told):
        RunConfig.from_dict(cfg)


def test_an_older_folder_has_what_was_in_effect_then():
    cfg = composed.cfg("comm=gloo", "epochs=3")
    older = {key: value for key, value in cfg.items() if key not in ("measure", "profile", "clip_norm")}
    older["comm"] = {key: cfg["comm"][key] for key in ("backend", "processes", "workers_per_process", "timeout")}
    config = RunConfig.from_dict(completed(older))
    assert config == RunConfig.from_dict(cfg) and config.comm == CommConfig(backend="gloo")
    assert completed(cfg) == cfg


def test_a_key_that_is_no_text_is_no_option():
    with pytest.raises(ConfigError, match=r"^1 is no option here; type"):
        RunConfig.from_dict({**composed.cfg(), 1: 2})
