"""Where the package and the YAML files are (imports nothing heavy)."""

import copy
import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

from accordion_bench.options.checks import ConfigError

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


_own: list[Path] = []  # folders of users' YAML files, of --config-dir


def package_dir() -> Path:
    """The folder of the package's code."""
    return Path(__file__).parents[1]


@functools.cache
def conf_dir() -> Path:
    """The folder of YAML files: in the installed package, or beside it in a checkout."""
    packaged = package_dir() / "conf"
    return packaged if packaged.is_dir() else package_dir().parent / "conf"


def conf_dirs() -> list[Path]:
    """The folders in which a config group is looked up: the package's first, as Hydra does, then those added."""
    return [conf_dir(), *_own]


def add_conf_dir(folder: str) -> None:
    """Look up config groups in a user's folder, too.

    Raises:
        ConfigError: it is none.
    """
    if not Path(folder).is_dir():
        raise ConfigError(
            f"--config-dir must be a folder with config groups in it, got {folder or 'nothing'}, which is none; type "
            "--config-dir=FOLDER, with FOLDER/compressor/mine.yaml in it, say"
        )
    if (whole := Path(folder).absolute()) not in conf_dirs():
        _own.append(whole)


def yaml_files(group: str) -> dict[str, Path]:
    """The YAML files of a config group, by name."""
    found = {file.stem: file for folder in reversed(conf_dirs()) for file in (folder / group).glob("*.yaml")}
    return dict(sorted(found.items()))


def yaml_file(group: str, name: str) -> Path | None:
    """The YAML file of one choice, which may lie in a folder of the group; None = there is none."""
    files = (folder / group / f"{name}.yaml" for folder in conf_dirs())
    return next((file for file in files if file.is_file()), None)


def import_from_here() -> None:
    """Let `_target_` name modules of the current folder; last, so that it hides nothing that is installed."""
    here = os.getcwd()
    if not sys.flags.safe_path and not {"", here} & set(sys.path):
        sys.path.append(here)
