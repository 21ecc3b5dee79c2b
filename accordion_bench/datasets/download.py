"""Files that a data set needs: there, or downloaded."""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from accordion_bench.options.checks import ConfigError


def ensure(root: str, folder: str, files: Sequence[str], download: Callable[[], object], timeout: float) -> None:
    """Make sure that files are in a folder.

    Args:
        root: `paths.data`.
        folder: in there.
        files: in the folder.
        download: fetches and verifies them.
        timeout: seconds that a silent network may take to say anything.

    Raises:
        ConfigError: they are not there and cannot be fetched.
    """
    if all((Path(root) / folder / name).is_file() for name in files):
        return
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(timeout)
    try:
        download()
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"paths.data must hold the folder {folder}, got {root} without it or not whole, and downloading "
            f"failed ({type(error).__name__}); type paths.data=FOLDER, or dataset=digits, which needs no download"
        ) from error
    finally:
        socket.setdefaulttimeout(before)


def refuse_size(what: str, expected: int, found: int, where: Path) -> None:
    """Refuse files that hold another number of images than their data set has.

    Raises:
        ConfigError: they do.
    """
    if found != expected:
        raise ConfigError(
            f"paths.data must hold all {expected:,} {what} images, got {found:,} in {where}; type another paths.data, "
            "or remove that folder to download it anew"
        )


def not_readable(file: Path, error: Exception) -> ConfigError:
    """The sentence for a file that is no original."""
    return ConfigError(
        f"paths.data must hold the original files, got {file}, which cannot be read ({type(error).__name__}: {error}); "
        "type another paths.data, or remove that file to download it anew"
    )
