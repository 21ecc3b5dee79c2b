"""Instantiate a config group: import the class that `_target_` names and call it; check the kinds of values.

Also decides which classes a configuration may name: those in the package's YAML files, in folders of --config-dir, and
those trusted explicitly. Importing a module executes its code, and a run folder from a stranger names classes too, so
code that reads such a folder must check them first.
"""

import functools
import importlib
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accordion_bench.options import advice, checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.component import Description
from accordion_bench.options.conf_dir import Config as Config
from accordion_bench.options.conf_dir import conf_dirs, read_yaml, yaml_files


def build(
    node: Config,
    group: str,
    *,
    positional: Sequence[Any] = (),
    adapt: Callable[[Any], Any] = lambda cls: cls,
    **extra: Any,
) -> Any:
    """Call the class that `_target_` names with the node's other keys.

    Args:
        node: config group.
        group: its name, for messages.
        positional: positional arguments that are not options.
        adapt: function that transforms the class before it is called.
        extra: keyword arguments that are not options.

    Raises:
        ConfigError: the class refuses a value.
    """
    cls = target(node, group)
    options = {key: value for key, value in node.items() if key != "_target_"}
    try:
        return adapt(cls)(*positional, **options, **extra)
    except ValueRefused as refused:
        raise refused.under(group) from None
    except ConfigError:
        raise
    except Exception as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        none = options and str(error).endswith("takes no arguments")
        if unknown or none:
            option = unknown[1] if unknown else next(iter(options))
            key = f"{group}.{option}"
            files = yaml_files(group.partition(".")[0])
            holders = [files[name] for name in advice.choices_with_option(key)]
            if file := next(
                (file for file in holders if read_yaml(file).get("_target_") == node.get("_target_")), None
            ):
                raise ConfigError(
                    f"{key} is no option of {cls.__name__}, got it in {file}; correct that file"
                ) from error
            if holders:
                raise ConfigError(advice.unknown_key(key, checks.show(options.get(option)))) from error
            raise ConfigError(f"{key} is no option of {cls.__name__}; type --help {group}") from error
        shown = ", ".join(f"{group}.{key}={checks.show(value)}" for key, value in options.items())
        raise ConfigError(f"{group} must fit together, got {shown}: {error}; type other values") from error


def target(node: Config, group: str) -> Any:
    """Return the class that `_target_` names.

    Raises:
        ConfigError: the module or class does not exist, or a module that it imports is not installed.
    """
    if not isinstance(node, Mapping):
        raise ConfigError(f"{group} must be a choice with its options, got {checks.show(node)}; type {group}=NAME")
    path = node.get("_target_")
    module, _, name = str(path).rpartition(".")
    rule = f"{group}._target_ must be the path of a class that can be imported, got {path}"
    return imported(module, name, rule, f"{group}=NAME instead")


def imported(module: str, name: str, rule: str, instead: str) -> Any:
    """Return the attribute `name` of a module; a ConfigError starts with `rule` and ends with what to type `instead`.

    Raises:
        ConfigError: the module or name does not exist, or a module that it imports is not installed.
    """
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            why = f"there is no module {error.name} here"
        else:
            why = f"{module} imports {error.name}, which is not installed"
            instead = f"pip install {str(error.name).partition('.')[0]}, or {instead}"
        raise ConfigError(f"{rule}: {why}; type {instead}") from None
    except ImportError as error:
        raise ConfigError(f"{rule}: {error}; type {instead}") from error
    except ValueError:  # the module's name is empty
        raise ConfigError(f"{rule}; type {instead}") from None
    if not hasattr(found, name):
        raise ConfigError(f"{rule}: {module} has no {name}; type {instead}")
    return getattr(found, name)


# at the beginning of a line or inside {}, never in a comment; a regular expression is 50 times as fast as parsing
TARGET = re.compile(r"""^[^#\n]*?\b_target_["']?[ ]*:[ ]*["']?([A-Za-z_][\w.]*)""", re.MULTILINE)

_added: set[str] = set()  # paths added by --trust


def trusted_targets(group: str = "") -> frozenset[str]:
    """Return the paths of all trusted classes of a config group such as `schedule`; "" = of all groups."""
    return _in_files(tuple(conf_dirs()), group) | _added


def is_trusted(path: object, group: str = "", also: Iterable[str] = ()) -> bool:
    """Whether a class (value of `_target_`, of any type) may be imported; the paths in `also` are trusted too."""
    return isinstance(path, str) and (path in also or path in trusted_targets(group))


def trust(config: Any) -> None:
    """Trust all classes that a configuration names, in this process and in processes forked later."""
    _added.update(path for _, path in targets_in(config) if isinstance(path, str))


def targets_in(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and value of each `_target_` in a configuration or the part of it at `key`.

    Nested groups and lists are searched; items of a list have the list's key.
    """
    if isinstance(config, dict):
        for name, value in config.items():
            inside = f"{key}.{name}" if key else str(name)
            if name == "_target_":
                yield inside, value
            else:
                yield from targets_in(value, inside)
    elif isinstance(config, list):
        for value in config:
            yield from targets_in(value, key)


@functools.cache
def _in_files(folders: tuple[Path, ...], group: str) -> frozenset[str]:
    files = [file for folder in folders for file in (folder / group).rglob("*.yaml")]
    return frozenset(path for file in files for path in TARGET.findall(file.read_text(encoding="utf-8")))


def check_value_kinds(declared: Config, given: Config, prefix: str) -> None:
    """Refuse values of another kind than the default: text for a number, a number for a list, null for a value."""
    group = prefix.rstrip(".")
    several = _of_several_kinds(declared.get("_target_"), group)
    for name, default in declared.items():
        if name not in given or default is None or (isinstance(default, str) and "${" in default):
            continue
        if name in several and (several[name] is Any or given[name] is None):
            continue  # the constructor checks it
        key, value = f"{prefix}{name}", given[name]
        kinds: Any = next(kind for kind in (bool, (int, float), str, list, dict) if isinstance(default, kind))
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            if name in _said_of_several_kinds(declared.get("_target_"), group):
                continue  # the code that uses it checks it
            rule = "{true} or {false}" if isinstance(default, bool) else checks.kind_of(default)
            if isinstance(default, dict):
                option = f"{key}.{next(iter(default), 'OPTION')}=VALUE"
                raise ConfigError(f"{key} must be {rule}, got {checks.show(value)}; type {option}")
            raise ValueRefused(key, rule, value, default)
        if isinstance(value, dict):
            check_value_kinds(default, value, f"{key}.")


def _said_of_several_kinds(path: str | None, group: str) -> frozenset[str]:
    """Return the options that a class declares to be of several kinds."""
    cls = target({"_target_": path}, group) if path else None
    description: Description = getattr(cls, "description", Description())
    return description.of_several_kinds


@functools.cache
def _of_several_kinds(path: str | None, group: str = "") -> dict[str, Any]:
    """Return the options of one of this package's classes whose annotation accepts None or Any."""
    if not str(path).startswith("accordion_bench."):
        return {}
    hints = typing.get_type_hints(target({"_target_": path}, group).__init__)
    return {name: hint for name, hint in hints.items() if hint is Any or type(None) in typing.get_args(hint)}
