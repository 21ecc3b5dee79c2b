"""Where the YAML files are (imports nothing heavy)."""

from pathlib import Path


def conf_dir() -> Path:
    """The folder of YAML files: in the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"
