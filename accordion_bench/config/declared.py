"""Whether kinds of values agree with what is declared: by `RunConfig`, and by the YAML files of the config groups."""

import functools
import typing
from pathlib import Path
from typing import Any

from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.choice_file import options_of
from accordion_bench.options.conf_dir import yaml_file
from accordion_bench.options.instantiate import Config, target
from accordion_bench.run_config import GROUPS, RunConfig, defaults


def check_kinds(config: RunConfig) -> None:
    """Compare the kinds of all values with the defaults.

    Raises:
        ConfigError: for the first option that differs.
    """
    _same_kinds({**defaults(), **_groups(config)}, config.to_dict(), "")
    for name, node in config.adaptive.items():
        if not isinstance(node, dict):
            rule = "a policy's options"
            raise ConfigError(f"adaptive.{name} must be {rule}, got {checks.show(node)}; type adaptive={name}")


def _same_kinds(declared: Config, given: Config, prefix: str) -> None:
    """Refuse text for a number, a number for a list, null where a value is needed, and so on."""
    several = _of_several_kinds(declared.get("_target_"))
    for name, default in declared.items():
        if name not in given or default is None or (isinstance(default, str) and "${" in default):
            continue
        if name in several and (several[name] is Any or given[name] is None):
            continue  # the constructor checks it
        key, value = f"{prefix}{name}", given[name]
        kinds: Any = next(kind for kind in (bool, (int, float), str, list, dict) if isinstance(default, kind))
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            rule = checks.kind_of(default)
            if isinstance(default, dict):
                option = f"{key}.{next(iter(default), 'OPTION')}=VALUE"
                raise ConfigError(f"{key} must be {rule}, got {checks.show(value)}; type {option}")
            raise ValueRefused(key, rule, value, default)
        if isinstance(value, dict):
            _same_kinds(default, value, f"{key}.")


@functools.cache
def _of_several_kinds(path: str | None) -> dict[str, Any]:
    """The options of one of our classes that may be null or anything, by their annotations."""
    if not str(path).startswith("accordion_bench."):
        return {}
    hints = typing.get_type_hints(target({"_target_": path}, "").__init__)
    return {name: hint for name, hint in hints.items() if hint is Any or type(None) in typing.get_args(hint)}


def _groups(config: RunConfig) -> Config:
    """What the YAML files say for the names that are chosen; those of other classes check theirs alone."""
    declared: Config = {}
    for group in GROUPS:
        names = config.choices.get(group, "").split(",")
        nodes = {name: _yaml(file) for name in names if (file := yaml_file(group, name))}
        nodes = {name: node for name, node in nodes.items() if "_target_" in node}
        declared[group] = nodes if group == "adaptive" else next(iter(nodes.values()), {})
    return declared


@functools.cache
def _yaml(file: Path) -> Config:
    """The options of a YAML file as Hydra reads it."""
    from omegaconf import OmegaConf

    return options_of(OmegaConf.to_container(OmegaConf.load(file), resolve=False))  # type: ignore
