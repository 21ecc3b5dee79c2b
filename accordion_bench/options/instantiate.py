"""From a config group to an object: import the class that it names and call it.

Which classes a configuration may name: those of our YAML files, of folders added by --config-dir, and those trusted.

A run folder from a stranger names classes, too. To import a module is to run its code, so a reader of such a folder
asks here first.
"""

import functools
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accordion_bench.options import advice, checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.conf_dir import Config as Config
from accordion_bench.options.conf_dir import conf_dirs


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
        node: one config group.
        group: its name, for messages.
        positional: arguments that are no options.
        adapt: changes the class before it is called.
        extra: keyword arguments that are no options.

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
            if advice.holders_of(key):
                raise ConfigError(advice.unknown_key(key, checks.show(options.get(option)))) from error
            raise ConfigError(f"{key} is no option of {cls.__name__}; type --help {group}") from error
        shown = ", ".join(f"{group}.{key}={checks.show(value)}" for key, value in options.items())
        raise ConfigError(f"{group} must fit together, got {shown}: {error}; type other values") from error


def target(node: Config, group: str) -> Any:
    """The class that `_target_` names.

    Raises:
        ConfigError: there is no such module or class, or the module imports what is not there.
    """
    if not isinstance(node, Mapping):
        raise ConfigError(f"{group} must be a choice with its options, got {checks.show(node)}; type {group}=NAME")
    path = node.get("_target_")
    module, _, name = str(path).rpartition(".")
    rule = f"{group}._target_ must be the path of a class that can be imported, got {path}"
    return imported(module, name, rule, f"{group}=NAME instead")


def imported(module: str, name: str, rule: str, instead: str) -> Any:
    """What a module calls by this name.

    Args:
        module, name: of what is imported.
        rule: the sentence up to where it says why it cannot be.
        instead: what to type.

    Raises:
        ConfigError: there is no such module or name, or the module imports what is not there.
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
    except ValueError:  # no module at all
        raise ConfigError(f"{rule}; type {instead}") from None
    if not hasattr(found, name):
        raise ConfigError(f"{rule}: {module} has no {name}; type {instead}")
    return getattr(found, name)


# at the beginning of a line or inside of {}, never in a comment; a regular expression, because parsing takes 50 times
# as long
TARGET = re.compile(r"""^[^#\n]*?\b_target_["']?[ ]*:[ ]*["']?([A-Za-z_][\w.]*)""", re.MULTILINE)

_added: set[str] = set()  # by --trust


def trusted_targets(group: str = "") -> frozenset[str]:
    """The paths of all classes that are trusted.

    Args:
        group: only those of this config group, `schedule` say, whose classes may be called, too; "" = of all.
    """
    return _in_files(tuple(conf_dirs()), group) | _added


def is_trusted(path: object, group: str = "", also: Iterable[str] = ()) -> bool:
    """Whether a class may be imported.

    Args:
        path: what a configuration has under `_target_`, of whatever kind.
        group: as for `trusted_targets`.
        also: paths that the command as composed now names.
    """
    return isinstance(path, str) and (path in also or path in trusted_targets(group))


def trust(config: Any) -> None:
    """Trust the classes that a configuration names from now on, in this process and those that it forks."""
    _added.update(path for _, path in targets_in(config) if isinstance(path, str))


def targets_in(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Whatever stands under a `_target_` in a configuration, of whatever kind, with its dotted key.

    Those of nested groups and lists are among them; what is in a list has the list's key.

    Args:
        config: a configuration, or a part of it.
        key: of that part.
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
