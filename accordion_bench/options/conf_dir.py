"""Where the package and its YAML files are (imports nothing heavy)."""

from pathlib import Path


def package_dir() -> Path:
    """The folder of the package's code."""
    return Path(__file__).parents[1]


def conf_dir() -> Path:
    """The folder of YAML files: in the installed package, or beside it in a checkout."""
    packaged = package_dir() / "conf"
    return packaged if packaged.is_dir() else package_dir().parent / "conf"
