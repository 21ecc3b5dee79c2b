"""Whether a folder takes what a run writes: looked at before anything is read or trained."""

import os
import tempfile
from pathlib import Path

from accordion_bench.options.checks import ConfigError, as_typed


def refuse_unwritable(key: str, folder: str) -> None:
    """Refuse a folder in which nothing can be written; it need not be there yet.

    Args:
        key: where it stands.
        folder: as it was typed.

    Raises:
        ConfigError: says why, and names a folder that can be written.
    """
    if why := _why_not(Path(folder)):
        here = "" if os.path.isabs(folder) else f" in {Path.cwd()}"
        own = "null" if key == "resume" else _elsewhere(folder)
        raise ConfigError(
            f"{key} must be a folder that can be written, got {folder}{here}: {why}; type {as_typed(key, own)}"
        )


def _why_not(folder: Path) -> str:
    """Why the folder, or the nearest one above it that is there, takes no files; "" where it does."""
    try:
        nearest = next(path for path in [folder, *folder.absolute().parents] if path.exists())
        if not nearest.is_dir():
            return f"{nearest} is a file"
        with tempfile.TemporaryFile(dir=nearest):
            return ""
    except FileNotFoundError:  # of a file that is just about to be made: /proc, say
        return f"{nearest} takes no files"
    except OSError as error:  # a name that is too long, say
        return error.strerror or type(error).__name__


def _elsewhere(folder: str) -> str:
    """A folder of that name where the user may write."""
    name = Path(folder).name if os.path.isabs(folder) else folder
    places = [place / name for place in (Path.home(), Path(tempfile.gettempdir()))]
    return str(next((place for place in places if not _why_not(place)), places[0]))
