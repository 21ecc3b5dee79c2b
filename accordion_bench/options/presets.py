"""Names of choices whose options differ from their YAML file, so that labels do not mislead."""

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any

from accordion_bench.options.checks import show
from accordion_bench.options.conf_dir import read_options, yaml_file, yaml_files
from accordion_bench.options.instantiate import Config
from accordion_bench.options.units import without_units


def named(config: Config, group: str, besides: Collection[str] = ()) -> str:
    """Return `vgg19`, or `vgg19 (width=8)` if options other than `besides` differ from the choice's YAML file."""
    choice, told = (config.get("choices") or {}).get(group) or "", changed_options(config, group, besides)
    return f"{choice} ({', '.join(told)})" if told else choice


def changed_options(config: Config, group: str, besides: Collection[str] = ()) -> list[str]:
    """Return the changed options of a choice as `width=8`; arguments as for `named`."""
    node = config.get(group)
    changed = overridden(group, (config.get("choices") or {}).get(group) or "", node if isinstance(node, dict) else {})
    return [f"{key}={show(value)}" for key, value in changed.items() if key not in besides]


def overridden(group: str, choice: str, node: Config) -> Config:
    """Return the options that differ from the YAML file of the choice; empty if there is no such file.

    Options that only one of the two contains are omitted, because versions differ in them.
    """
    file = yaml_file(group, choice) if choice else None
    usual = {} if file is None else _usual(file, file.stat().st_mtime_ns)
    return {
        key: value
        for key, value in node.items()
        if key in usual and not _interpolated(usual[key]) and not _same(value, usual[key])
    }


def preset_of(group: str, choice: str, node: Config) -> tuple[str, Config]:
    """Return (the choice that fits the options best, the options that no choice's name expresses).

    Several choices may share a class: `bf16` with dtype=float16 is `fp16`. Choices are distinguished by words,
    booleans, and the presence of values. Numbers are levels, which labels show separately.
    """
    alike = {
        name: options
        for name, file in yaml_files(group).items()
        if (options := _usual(file, file.stat().st_mtime_ns)).get("_target_") == node.get("_target_")
    }
    if choice not in alike:
        return choice, {}
    telling = {key for key in node if len({_kind(options.get(key)) for options in alike.values()}) > 1}

    def unlike(name: str) -> list[str]:
        """Return the options that differ from this preset, including those that only the preset has."""
        own = alike[name]
        return [key for key in own if key not in node or (key in telling and _kind(node[key]) != _kind(own[key]))]

    own = unlike(choice)
    other = next((name for name in alike if not unlike(name)), "") if own else ""
    return (other, {}) if other else (choice, {key: node[key] for key in own if key in node})


@functools.cache
def _usual(file: Path, changed: int) -> Config:
    """Return the cached options of a YAML file; must not be modified."""
    return without_units(read_options(file))


def _kind(value: Any) -> str:
    """Return what distinguishes presets: a word, or the presence of a number or list; 0 counts as absent."""
    if value is None or isinstance(value, bool | str) or value == 0:
        return show(value)
    return type(value).__name__ if isinstance(value, list | dict) else "a number"


def _same(value: Any, usual: Any) -> bool:
    """Whether two values are equal; YAML reads 1e-4 as a string."""
    try:
        return bool(float(value) == float(usual))
    except (TypeError, ValueError):
        return bool(value == usual)


def _interpolated(value: Any) -> bool:
    return isinstance(value, str) and "${" in value
