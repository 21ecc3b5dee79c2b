"""A choice's YAML file as a plain dict of its options (imports nothing heavy)."""

import copy
import functools
import re
from pathlib import Path
from typing import Any

Config = dict[str, Any]
NO_OPTIONS = ("defaults", "brings")  # what Hydra reads; what the choice brings to other groups


def read_options(file: Path) -> Config:
    """The options with their defaults, where no other choice brings its own."""
    return options_of(read_yaml(file))


def read_yaml(file: Path) -> Config:
    """All that a file says; the caller's own copy."""
    return copy.deepcopy(_parsed(file, file.stat().st_mtime_ns))


@functools.cache
def _parsed(file: Path, changed: int) -> Config:
    import yaml

    return yaml.safe_load(file.read_text(encoding="utf-8")) or {}


def options_of(node: Config) -> Config:
    """The options of what a file says."""
    return {key: plain(value) for key, value in node.items() if key not in NO_OPTIONS}


def plain(value: Any) -> Any:
    """`${brought:0.1}` is 0.1, anything else itself."""
    found = re.fullmatch(r"\$\{brought:(.*)\}", value) if isinstance(value, str) else None
    return _scalar(found[1]) if found else value


@functools.cache
def _scalar(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)
