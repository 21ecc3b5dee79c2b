"""Merging of the arguments of `ab.attach` and `ab.local` with the defaults of the YAML files."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from accordion_bench.methods.compatibility import MethodOptions
from accordion_bench.options import checks
from accordion_bench.options.advice import ALSO_CALLED
from accordion_bench.options.checks import ConfigError
from accordion_bench.options.conf_dir import read_options, yaml_file, yaml_files
from accordion_bench.options.instantiate import Config, check_value_kinds

Named = str | Mapping[str, Mapping[str, Any]]
"""A name, or {name: {option: value}}."""

Several = Named | Sequence[str] | None
"""One or several names, in order."""


def choose(
    compressor: Named,
    adaptive: Several,
    sync: Named,
    optimizer: Config,
    options: Mapping[str, Any],
    arguments: Collection[str],
) -> MethodOptions:
    """Return the chosen compressor, scheme and policies with all options, defaults from the YAML files.

    `options` are those of the compressor or the scheme; `arguments` are the names of all others, for messages.

    Raises:
        ConfigError: a name or an option is unknown, or a value has the wrong type.
    """
    if "sync" in options:
        raise ConfigError(f"sync is an argument of ab.local; call ab.local(model, optimizer, sync={options['sync']!r})")
    names = {"compressor": compressor, "sync": sync}
    nodes = {group: _node(group, named) for group, named in names.items()}
    for key, value in options.items():
        holders = [group for group, (_, node) in nodes.items() if key in node and key != "_target_"]
        if not holders:
            raise _unknown(key, [node for _, node in nodes.values()], arguments)
        if len(holders) > 1:
            name = nodes[holders[0]][0]
            raise ConfigError(
                f"{key} must say whose it is, got {key}={value!r} where both compressor and sync have one; pass "
                f"{holders[0]}={{{name!r}: {{{key!r}: {value!r}}}}}, say"
            )
        nodes[holders[0]][1][key] = value
    for group, (name, node) in nodes.items():
        check_value_kinds(read_options(_file(group, name)), node, f"{group}.")
    (compressor_name, compressor_node), (sync_name, sync_node) = nodes["compressor"], nodes["sync"]
    policies = dict(_node("adaptive", named) for named in _listed(adaptive))
    policies.pop("none", None)
    for name, node in policies.items():
        check_value_kinds(read_options(_file("adaptive", name)), node, f"adaptive.{name}.")
    return MethodOptions(compressor_name, compressor_node, sync_name, sync_node, policies, optimizer)


def recorded(chosen: MethodOptions) -> dict[str, Any]:
    """Return names and options of the chosen methods as plain data."""
    return {
        "compressor": {"name": chosen.compressor_name, **chosen.compressor},
        "sync": {"name": chosen.sync_name, **chosen.sync},
        "adaptive": {name: dict(node) for name, node in chosen.adaptive.items()},
    }


def _listed(adaptive: Several) -> list[Named]:
    if adaptive is None:
        return []
    if isinstance(adaptive, str):
        return [adaptive]
    if isinstance(adaptive, Mapping):
        return [{name: options} for name, options in adaptive.items()]
    return list(adaptive) if isinstance(adaptive, Sequence) else [adaptive]


def _node(group: str, named: Named) -> tuple[str, Config]:
    if isinstance(named, Mapping) and len(named) != 1:
        raise ConfigError(
            f"{group} must be one name with its options, got {dict(named)}; pass {group}={{'NAME': {{}}}}"
        )
    name, given = next(iter(named.items())) if isinstance(named, Mapping) else (named, {})
    node = read_options(_file(group, name))
    if not isinstance(given, Mapping | None):
        raise ConfigError(f"{group}.{name} must be {{option: value}}, got {given!r}; pass {group}={{{name!r}: {{}}}}")
    for key in given or {}:
        if key not in node or key == "_target_":
            raise _unknown(f"{group}.{name}.{key}", [node], ())
    return name, {**node, **(given or {})}


def _file(group: str, name: Any) -> Any:
    """Return the YAML file of a choice."""
    known = list(yaml_files(group))
    if not isinstance(name, str):
        rule = "a name, or {name: {option: value}}"
        raise ConfigError(f"{group} must be {rule}, got {name!r}; pass {group}={known[0]!r}, say")
    found = yaml_file(group, name)
    if found is None:
        near = checks.closest(name, known)
        raise ConfigError(
            f"{group} must be a known name, got {name!r}; pass {group}={near!r} (there are {', '.join(known)})"
        )
    return found


def _unknown(key: str, nodes: Sequence[Config], arguments: Collection[str]) -> ConfigError:
    """Return the error for an unknown option, with the nearest known one."""
    known = [option for node in nodes for option in node if option != "_target_"]
    last = key.rpartition(".")[2]
    near = ALSO_CALLED.get(last, "")
    near = near if near in known else checks.closest(last, [*known, *arguments], cutoff=0.6)
    listed = f"options here are {', '.join(known)}" if known else "there are none here"
    return ConfigError(f"{key} is no option; {f'pass {near}=..., ' if near else ''}{listed}")


def arguments_of(function: Any) -> list[str]:
    """Return the names of the arguments that a function accepts by keyword."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, value in inspect.signature(function).parameters.items() if value.kind in kinds]
