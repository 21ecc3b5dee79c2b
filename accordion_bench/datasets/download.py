"""Files that a data set needs: there, or downloaded."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from accordion_bench.datasets import fetch
from accordion_bench.datasets.fetch import Source
from accordion_bench.options.checks import ConfigError

_failed: dict[tuple[str, str], ConfigError] = {}  # of this process: what could not be fetched is not asked for again


def find(root: str, folder: str, files: Sequence[str]) -> Path | None:
    """The folder that holds all files: in `root`, `root` itself, or one level further down; None where there is none.

    Args:
        root: `paths.data`.
        folder: its name.
        files: in the folder; `*` as in shells.
    """
    here = Path(root)
    places = [here / folder, *([here] if here.absolute().name == folder else []), *sorted(here.glob(f"*/{folder}"))]
    return next((place for place in places if all(_holds(place, name) for name in files)), None)


def _holds(folder: Path, name: str) -> bool:
    return any(path.is_file() for path in folder.glob(name))


def ensure(
    root: str, folder: str, files: Sequence[str], sources: Callable[[], Sequence[Source]], timeout: float
) -> Path:
    """Make sure that files are in a folder: those that are there are taken as they are.

    Args:
        root: `paths.data`.
        folder: in there.
        files: in the folder.
        sources: what they can be had from; asked for where they lack.
        timeout: seconds that a silent network may take to say anything.

    Returns:
        the folder that holds them, see `find`.

    Raises:
        ConfigError: they are not there and cannot be fetched.
    """
    if found := find(root, folder, files):
        return found
    if failed := _failed.get((root, folder)):
        raise failed
    try:
        if not Path(root).exists():
            Path(root).mkdir(parents=True, exist_ok=True)
            print(f"paths.data={root} was not there and is made; {folder} is downloaded into it", file=sys.stderr)
        with fetch.alone(Path(root), folder):
            if not find(root, folder, files):  # nobody else has brought them meanwhile
                fetch.fetch(Path(root), folder, files, sources(), timeout)
    except (OSError, fetch.Unusable) as error:
        of_system = error.strerror if isinstance(error, OSError) and isinstance(error.strerror, str) else ""
        why = str(error) if isinstance(error, fetch.Unusable) else of_system or type(error).__name__
        _failed[root, folder] = ConfigError(
            f"paths.data must hold the folder {folder}, got {root} without it or not whole, and downloading "
            f"failed ({why}); type paths.data=FOLDER, or dataset=digits, which needs no download"
        )
        raise _failed[root, folder] from error
    return find(root, folder, files) or Path(root, folder)


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
