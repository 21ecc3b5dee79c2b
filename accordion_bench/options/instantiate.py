"""From a config group to an object: import the class that it names and call it."""

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from accordion_bench.options import advice, checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.choice_file import Config as Config


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
