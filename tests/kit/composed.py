"""Configurations equal to those of `compose`, with one call of Hydra (0.1 s each); test_composed.py compares them."""

import copy
import functools
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from accordion_bench.config import validate
from accordion_bench.config.components import Components, build_components
from accordion_bench.config.compose import compose, register_resolvers, resolve
from accordion_bench.config.validate import options_without_effect
from accordion_bench.options.conf_dir import conf_dir, conf_dirs
from accordion_bench.processes.placement import place
from accordion_bench.run_config import RunConfig

RUNS = "paths.runs="


@functools.cache
def _base() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return Hydra's configuration without overrides, with unresolved interpolations, and the choices."""
    from hydra import compose, initialize_config_dir

    register_resolvers()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        full = compose("config", [], return_hydra_config=True)
    choices = dict(full.hydra.runtime.choices)
    with open_dict(full):
        del full["hydra"]
    return _plain(full), choices


@functools.cache
def _file(group: str, name: str) -> dict[str, Any] | None:
    """Return the content of a choice's file, read as by Hydra; None if there is no file."""
    path = conf_dir() / group / f"{name}.yaml"
    return _plain(OmegaConf.load(path)) if path.is_file() else None


def _plain(node: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(node, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@functools.cache
def _is_choice(override: str) -> bool:
    return (conf_dir() / override.partition("=")[0]).is_dir()


@functools.cache
def _value(override: str) -> Any:
    """Return the value of `key=value` in Hydra's grammar; a dict, which Hydra would merge, if it is not one value."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return {}  # a list of overrides gives a more detailed error than a single one
    return {} if parsed.is_add() or parsed.is_delete() or parsed.is_sweep_override() else parsed.value()


class _HydraIsNeeded(Exception):
    pass


def _choose(raw: dict[str, Any], choices: dict[str, Any], typed: dict[str, str]) -> None:
    """Replace nodes by the content of the chosen files."""
    chosen: dict[str, Any] = {}
    names = typed.get("adaptive", "none").removeprefix("[").removesuffix("]").split(",")
    policies = [(name, copy.deepcopy(_file("adaptive", name))) for name in names]
    for _, node in policies:
        for item in (node or {}).pop("defaults", []):
            for key, name in item.items() if isinstance(item, dict) else ():
                group = key.removeprefix("override /").partition("@")[0]
                if chosen.setdefault(group, name) != name:
                    raise _HydraIsNeeded  # two files choose differently; Hydra decides by their order
    for group, name in {**chosen, **typed}.items():
        node = policies[0][1] if group == "adaptive" else copy.deepcopy(_file(group, name))
        if node is None or "defaults" in node:
            raise _HydraIsNeeded
        raw[group], choices[group] = node, name
    if "adaptive" in typed:
        if any(node is None or name == "none" for name, node in policies[1:]):
            raise _HydraIsNeeded
        raw["adaptive"] = {name: node for name, node in policies if name != "none"}
        if typed["adaptive"].startswith("["):
            del choices["adaptive"]  # Hydra reports no choice for a list of policies


def cfg(*overrides: str) -> dict[str, Any]:
    """Return `compose(overrides)`, by inserting values and the files of choices into a cached configuration.

    Many tests request the same run, each in its own folder, which affects nothing else.
    """
    if len(conf_dirs()) > 1:
        return compose(overrides)
    found = copy.deepcopy(_cfg(tuple(item for item in overrides if not item.startswith(RUNS))))
    for item in overrides:
        if item.startswith(RUNS):
            found["paths"]["runs"] = _value(item)
    return found


@functools.lru_cache(maxsize=256)
def _cfg(overrides: tuple[str, ...]) -> dict[str, Any]:
    raw, choices = copy.deepcopy(_base())
    typed = [override.partition("=") for override in overrides if _is_choice(override)]
    try:
        if len({group for group, _, _ in typed}) < len(typed):
            raise _HydraIsNeeded
        _choose(raw, choices, {group: name for group, _, name in typed})
        for option in overrides:
            if not _is_choice(option):
                _set(raw, option)
    except _HydraIsNeeded:
        return compose(overrides)
    return resolve(OmegaConf.create(raw), choices)


def _set(raw: dict[str, Any], option: str) -> None:
    *path, last = option.partition("=")[0].split(".")
    node: Any = raw
    for part in path:
        node = node.get(part) if isinstance(node, dict) else None
    there = isinstance(node, dict) and last in node and not isinstance(node[last], dict)
    if not there or isinstance(_value(option), dict):
        raise _HydraIsNeeded
    node[last] = copy.deepcopy(_value(option))


def config(*overrides: str) -> RunConfig:
    """Return `cfg` of the same arguments as a RunConfig."""
    return RunConfig.from_dict(cfg(*overrides))


def run(runs: Path, *overrides: str) -> dict[str, Any]:
    """Return `tiny.cfg` of the same arguments as a RunConfig."""
    from tests.kit import tiny

    return tiny.cfg(runs, *overrides)


def unresolved(preset: str, arm: str = "") -> DictConfig:
    """Return Hydra's configuration of an experiment, with its own node; do not modify it."""
    return _unresolved(preset, arm)


@functools.cache
def _unresolved(preset: str, arm: str) -> DictConfig:
    from hydra import compose, initialize_config_dir

    register_resolvers()
    overrides = [f"+experiment={preset}", *([f"+arm={arm}"] if arm else [])]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides, return_hydra_config=True)


@functools.cache
def swept(preset: str, at: str = "full") -> dict[str, list[str]]:
    """Return the sweep of an experiment."""
    full = unresolved(preset).copy()
    full.scale = at
    params = OmegaConf.to_container(full.hydra.sweeper.params, resolve=True)
    assert isinstance(params, dict)
    return {str(key): str(values).split(",") for key, values in params.items()}


def parts_of(cfg: dict[str, Any]) -> Components:
    """Return the components of a configuration in which the number of workers is set."""
    return build_components(RunConfig.from_dict(cfg), cfg["workers"])


def validated(cfg: dict[str, Any]) -> Components:
    """Validate a configuration for this machine, and return its components.

    Raises:
        ConfigError: a value breaks a rule.
    """
    config = RunConfig.from_dict(cfg)
    return validate.validate(config, place(config))


def warnings(cfg: dict[str, Any], typed: set[str]) -> list[str]:
    """Return the warnings about options without effect."""
    return options_without_effect(RunConfig.from_dict(cfg), typed, parts_of(cfg))
