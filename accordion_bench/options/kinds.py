"""Check that values have the declared kind: text, number, list, boolean, null."""

import functools
import typing
from typing import Any

from accordion_bench.options import checks
from accordion_bench.options.checks import ConfigError, ValueRefused
from accordion_bench.options.component import Description
from accordion_bench.options.instantiate import Config, target


def check_value_kinds(declared: Config, given: Config, prefix: str) -> None:
    """Refuse values of another kind than the default: text for a number, a number for a list, null for a value."""
    several = _of_several_kinds(declared.get("_target_"))
    for name, default in declared.items():
        if name not in given or default is None or (isinstance(default, str) and "${" in default):
            continue
        if name in several and (several[name] is Any or given[name] is None):
            continue  # the constructor checks it
        key, value = f"{prefix}{name}", given[name]
        kinds: Any = next(kind for kind in (bool, (int, float), str, list, dict) if isinstance(default, kind))
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            if name in _said_of_several_kinds(declared.get("_target_")):
                continue  # the code that uses it checks it
            rule = "{true} or {false}" if isinstance(default, bool) else checks.kind_of(default)
            if isinstance(default, dict):
                option = f"{key}.{next(iter(default), 'OPTION')}=VALUE"
                raise ConfigError(f"{key} must be {rule}, got {checks.show(value)}; type {option}")
            raise ValueRefused(key, rule, value, default)
        if isinstance(value, dict):
            check_value_kinds(default, value, f"{key}.")


def _said_of_several_kinds(path: str | None) -> frozenset[str]:
    """Return the options that a class declares to be of several kinds."""
    cls = target({"_target_": path}, "") if path else None
    description: Description = getattr(cls, "description", Description())
    return description.of_several_kinds


@functools.cache
def _of_several_kinds(path: str | None) -> dict[str, Any]:
    """Return the options of one of this package's classes whose annotation accepts None or Any."""
    if not str(path).startswith("accordion_bench."):
        return {}
    hints = typing.get_type_hints(target({"_target_": path}, "").__init__)
    return {name: hint for name, hint in hints.items() if hint is Any or type(None) in typing.get_args(hint)}
