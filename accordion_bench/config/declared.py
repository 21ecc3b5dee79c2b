"""Check the kinds of values against the defaults in the YAML files of the config groups."""

import functools
from pathlib import Path

from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import options_of, yaml_file
from accordion_bench.options.instantiate import Config, check_value_kinds
from accordion_bench.run_config import GROUPS, RunConfig


def check_kinds(config: RunConfig) -> None:
    """Refuse values in config groups of another kind than the default; `run_level` checks the other options."""
    check_value_kinds(_groups(config), config.to_dict(), "")
    for name, node in config.adaptive.items():
        if not isinstance(node, dict):
            rule = "a policy's options"
            raise ConfigError(f"adaptive.{name} must be {rule}, got {checks.show(node)}; type adaptive={name}")


def _groups(config: RunConfig) -> Config:
    """Return the defaults of the chosen names. Classes outside the YAML files check their options themselves."""
    declared: Config = {}
    for group in GROUPS:
        names = config.choices.get(group, "").split(",")
        nodes = {name: _yaml(file) for name in names if (file := yaml_file(group, name))}
        nodes = {name: node for name, node in nodes.items() if "_target_" in node}
        one = next(iter(nodes.values())) if len(nodes) == 1 else {}  # several trackers check their options themselves
        declared[group] = nodes if group == "adaptive" else one
    return declared


@functools.cache
def _yaml(file: Path) -> Config:
    from omegaconf import OmegaConf

    return options_of(OmegaConf.to_container(OmegaConf.load(file), resolve=False))  # type: ignore
