"""Locate and read the YAML files of config groups; imports neither torch nor Hydra."""

import copy
import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

from accordion_bench.options.checks import ConfigError

Config = dict[str, Any]
NO_OPTIONS = ("defaults", "brings")  # keys of Hydra, and defaults that the choice sets in other groups


def read_options(file: Path) -> Config:
    """Return the options of a YAML file with their own defaults, before other choices override them."""
    return options_of(read_yaml(file))


def read_yaml(file: Path) -> Config:
    """Return a copy of the content of a YAML file; ConfigError if it is not YAML, or not a mapping."""
    return copy.deepcopy(_parsed(file, file.stat().st_mtime_ns))


@functools.cache
def _parsed(file: Path, changed: int) -> Config:
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        at = getattr(error, "problem_mark", None)
        place = f"line {at.line + 1}, column {at.column + 1}: " if at else ""
        why = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ConfigError(f"{file} must be a YAML file, got {place}{why}; correct that file") from error
    if not isinstance(content, dict | None):
        raise ConfigError(f"{file} must have a line KEY: VALUE for each option, got {content}; correct that file")
    return content or {}


def options_of(node: Config) -> Config:
    """Return the options in the content of a YAML file."""
    return {key: plain(value) for key, value in node.items() if key not in NO_OPTIONS}


def plain(value: Any) -> Any:
    """Replace `${brought:0.1}` by 0.1; return other values unchanged."""
    found = re.fullmatch(r"\$\{brought:(.*)\}", value) if isinstance(value, str) else None
    return _scalar(found[1]) if found else value


@functools.cache
def _scalar(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)


_own: list[Path] = []  # folders given by --config-dir


def package_dir() -> Path:
    """Return the folder of the package's code."""
    return Path(__file__).parents[1]


@functools.cache
def conf_dir() -> Path:
    """Return the folder conf/: in the installed package, or next to the package in a checkout."""
    packaged = package_dir() / "conf"
    return packaged if packaged.is_dir() else package_dir().parent / "conf"


def conf_dirs() -> list[Path]:
    """Return the folders searched for config groups: first the package's, as in Hydra, then added ones."""
    return [conf_dir(), *_own]


def add_conf_dir(folder: str) -> None:
    """Add a user's folder to the search path of config groups; ConfigError if it does not exist."""
    if not Path(folder).is_dir():
        raise ConfigError(
            f"--config-dir must be a folder with config groups in it, got {folder or 'nothing'}, which is none; type "
            "--config-dir=FOLDER, with FOLDER/compressor/mine.yaml in it, say"
        )
    if (whole := Path(folder).absolute()) not in conf_dirs():
        _own.append(whole)


def yaml_files(group: str) -> dict[str, Path]:
    """Return the YAML files of a config group, by name."""
    found = {file.stem: file for folder in reversed(conf_dirs()) for file in (folder / group).glob("*.yaml")}
    return dict(sorted(found.items()))


def yaml_file(group: str, name: str) -> Path | None:
    """Return the YAML file of a choice, whose name may include a subfolder; None if it does not exist."""
    files = (folder / group / f"{name}.yaml" for folder in conf_dirs())
    return next((file for file in files if file.is_file()), None)


def import_from_here() -> None:
    """Let `_target_` name modules of the current folder; last in sys.path, so that it shadows nothing installed."""
    here = os.getcwd()
    if not sys.flags.safe_path and not {"", here} & set(sys.path):
        sys.path.append(here)
