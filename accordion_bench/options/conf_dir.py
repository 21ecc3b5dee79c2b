"""Where the package and the YAML files are (imports nothing heavy)."""

import functools
import os
import sys
from pathlib import Path

from accordion_bench.options.checks import ConfigError

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
