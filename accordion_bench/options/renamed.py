"""Options that have been renamed: their old names are read for one release more, with a warning."""

import copy
import sys
from collections.abc import Sequence
from typing import Any

# old name: (name of today, the version that has renamed it, which warns; the next minor version forgets the old one)
RENAMED: dict[str, tuple[str, str]] = {}


def overrides_in_todays_words(arguments: Sequence[str]) -> list[str]:
    """The words of a command line with every renamed key replaced; each is told on stderr."""
    return [_todays(word) for word in arguments]


def _todays(word: str) -> str:
    head, equals, value = word.partition("=")
    key = head.lstrip("+~")
    for old, (new, version) in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            named = key.replace(old, new, 1)
            told = f"{key} is called {named} since version {version}; type {named}{equals}{value}"
            print(f"warning: {told}", file=sys.stderr)
            return f"{head.removesuffix(key)}{named}{equals}{value}"
    return word


def config_in_todays_words(config: dict[str, Any]) -> dict[str, Any]:
    """A run folder's configuration with every renamed key moved to its name of today, if nothing is there."""
    found = copy.deepcopy(config) if RENAMED else config
    for old, (new, _) in RENAMED.items():
        *above, last = old.split(".")
        node: Any = found
        for part in above:
            node = node.get(part) if isinstance(node, dict) else None
        if isinstance(node, dict) and last in node:
            _put(found, new.split("."), node.pop(last))
    return found


def _put(node: dict[str, Any], path: Sequence[str], value: Any) -> None:
    *above, last = path
    for part in above:
        node = node.setdefault(part, {})
    node.setdefault(last, value)
