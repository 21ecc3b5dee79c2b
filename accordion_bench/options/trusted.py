"""Which classes a configuration may name: those of our YAML files, of folders added by --config-dir, and those trusted.

A run folder from a stranger names classes, too. To import a module is to run its code, so whoever reads such a folder
asks here first. Names of earlier versions are translated before (`runs/old_folders.py`).
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
        also: paths that the command as composed now names: `targets_in(config)`.
    """
    return isinstance(path, str) and (path in also or path in trusted_targets(group))


def trust(paths: Iterable[str]) -> None:
    """Trust some classes from now on, in this process and those that it forks."""
    _added.update(paths)


def targets_in(config: Any) -> Iterator[str]:
    """Every `_target_` of a configuration, those of nested groups and lists included."""
    if isinstance(config, dict):
        if isinstance(path := config.get("_target_"), str):
            yield path
        for value in config.values():
            yield from targets_in(value)
    elif isinstance(config, list):
        for value in config:
            yield from targets_in(value)


@functools.cache
def _in_files(folders: tuple[Path, ...], group: str) -> frozenset[str]:
    files = [file for folder in folders for file in (folder / group).rglob("*.yaml")]
    return frozenset(path for file in files for path in TARGET.findall(file.read_text(encoding="utf-8")))
