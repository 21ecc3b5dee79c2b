"""Configurations as `compose` gives them, but Hydra composes each choice of names only once (0.1 s each)."""

import copy
import functools
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from accordion_bench.config import resolvers, validate
from accordion_bench.config.components import Components, build_components
from accordion_bench.config.compose import compose
from accordion_bench.config.no_effect import without_effect
from accordion_bench.options.conf_dir import conf_dir
from accordion_bench.processes.placement import place
from accordion_bench.run_config import RunConfig

_once = functools.cache(compose)


@functools.cache
def _is_choice(override: str) -> bool:
    return (conf_dir() / override.partition("=")[0]).is_dir()


@functools.cache
def _value(override: str) -> Any:
    """What Hydra's grammar reads in `key=value`; a dict, which would be merged, where it is more than one value."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create().parse_override(override)
    return {} if parsed.is_add() or parsed.is_delete() or parsed.is_sweep_override() else parsed.value()


def cfg(*overrides: str) -> dict[str, Any]:
    """`compose(overrides)`; values are set by hand in what has been composed for the same choices before."""
    out = copy.deepcopy(_once(tuple(override for override in overrides if _is_choice(override))))
    if "brought" in out["choices"] and not all(map(_is_choice, overrides)):
        return compose(overrides)  # what is typed may send it back
    for option in overrides:
        if _is_choice(option):
            continue
        *path, last = option.partition("=")[0].split(".")
        node: Any = out
        for part in path:
            node = node.get(part) if isinstance(node, dict) else None
        there = isinstance(node, dict) and last in node and not isinstance(node[last], dict)
        gives_way = "brought" in out["choices"] and path[:1] == ["optimizer"]  # other defaults may, to what is typed
        if not there or gives_way or isinstance(_value(option), dict):
            return compose(overrides)
        node[last] = copy.deepcopy(_value(option))
    return out


def config(*overrides: str) -> RunConfig:
    """`cfg` of the same arguments, typed."""
    return RunConfig.from_dict(cfg(*overrides))


def run(runs: Path, *overrides: str) -> dict[str, Any]:
    """`tiny.cfg` of the same arguments."""
    from tests.kit import tiny

    return tiny.cfg(runs, *overrides)


@functools.cache
def unresolved(preset: str, arm: str = "") -> DictConfig:
    """What Hydra composes for an experiment, with its own node; not to be changed."""
    from hydra import compose, initialize_config_dir

    resolvers.register()
    overrides = [f"+experiment={preset}", *([f"+arm={arm}"] if arm else [])]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides, return_hydra_config=True)


@functools.cache
def swept(preset: str, at: str = "full") -> dict[str, list[str]]:
    """What an experiment sweeps over."""
    full = unresolved(preset).copy()
    full.scale = at
    params = OmegaConf.to_container(full.hydra.sweeper.params, resolve=True)
    assert isinstance(params, dict)
    return {str(key): str(values).split(",") for key, values in params.items()}


def parts_of(cfg: dict[str, Any]) -> Components:
    """The components of a configuration that says how many workers there are."""
    return build_components(RunConfig.from_dict(cfg), cfg["workers"])


def validated(cfg: dict[str, Any]) -> Components:
    """The components of a configuration that is validated for this machine.

    Raises:
        ConfigError: a value breaks a rule.
    """
    config = RunConfig.from_dict(cfg)
    return validate.validate(config, place(config))


def warnings(cfg: dict[str, Any], typed: set[str]) -> list[str]:
    """What the user is told of settings without effect."""
    return without_effect(RunConfig.from_dict(cfg), typed, parts_of(cfg))
