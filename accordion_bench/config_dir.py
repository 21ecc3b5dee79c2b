"""Where the YAML files are (imports nothing heavy)."""

from pathlib import Path


def conf_dir() -> Path:
    """The folder of YAML files: in the installed package, or beside it in a checkout."""
    packaged = Path(__file__).parent / "conf"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "conf"
