"""Which classes a configuration may name: those of our YAML files, of folders added by --config-dir, and those trusted.

A run folder from a stranger names classes, too. To import a module is to run its code, so whoever reads such a folder
asks here first.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from accordion_bench.options.conf_dir import conf_dirs

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
