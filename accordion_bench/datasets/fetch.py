"""Files that a data set needs: there, or downloaded from their authors, by one process at a time, and compared."""

import contextlib
import gzip
import hashlib
import http.client
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from accordion_bench import locks, output
from accordion_bench.options.checks import ConfigError

CHUNK = 1 << 20  # bytes


class Unusable(Exception):
    """What came is not what its authors offer; `str()` says why, without a full stop."""


@dataclass(frozen=True)
class Source:
    """A file as its authors offer it.

    Args:
        address: of a server, http or https.
        name: of the file; one that ends in .tar.gz is unpacked.
        md5: of its bytes, as published.
    """

    address: str
    name: str
    md5: str


@contextlib.contextmanager
def alone(root: Path, folder: str) -> Iterator[None]:
    """Let no other process fetch that folder meanwhile, and clear up after one that was killed; see `locks.locked`."""
    lock = root / f".{folder}.lock"
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locks.locked(lock))
        except locks.Taken:
            print(f"waiting for the process that is downloading {folder} into {root}", file=sys.stderr, flush=True)
            held.enter_context(locks.locked(lock, wait=True))
        for remains in root.glob(f".{folder}.part-*"):
            shutil.rmtree(remains, ignore_errors=True)
        yield


def fetch(root: Path, folder: str, files: Sequence[str], sources: Sequence[Source], timeout: float) -> None:
    """Put files into `root/folder`, all or none; to be called `alone`.

    A source that lies there or in `root` already, from an earlier attempt, is not asked for again.

    Args:
        root: exists.
        folder: the files' own.
        files: that must be there in the end, by name.
        sources: archives that hold `folder`, or its files.
        timeout: seconds that a silent network may take to say anything.

    Raises:
        Unusable: what came is not what the authors offer.
        OSError: network or disk failed.
    """
    part = Path(tempfile.mkdtemp(prefix=f".{folder}.part-", dir=root))
    try:
        new = part / "new" / folder  # one level deeper than `find` looks
        new.mkdir(parents=True)
        for source in sources:
            packed = source.name.endswith(".tar.gz")
            earlier = [file for file in (root / source.name, root / folder / source.name) if _md5(file) == source.md5]
            file = earlier[0] if earlier else _downloaded(source, part if packed else new, timeout)
            if packed:
                _unpack(file, new.parent)
            elif earlier:
                shutil.copyfile(file, new / source.name)
        if missing := [name for name in files if not (new / name).is_file() or (new / name).is_symlink()]:
            raise Unusable(f"{', '.join(source.name for source in sources)} came without {', '.join(missing)}")
        _move(new, root / folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _downloaded(source: Source, into: Path, timeout: float) -> Path:
    """The file, compared with its md5."""
    file = into / source.name
    print(f"downloading {source.name}", file=sys.stderr, flush=True)
    encrypted = source.address.replace("http://", "https://", 1)
    try:
        md5 = _read(encrypted, source.name, file, timeout)
    except OSError:
        if encrypted == source.address:
            raise
        md5 = _read(source.address, source.name, file, timeout)  # the md5 tells whether it was changed
    if md5 != source.md5:
        raise Unusable(f"{source.name} came with the md5 {md5} and not {source.md5}")
    return file


def _read(address: str, name: str, file: Path, timeout: float) -> str:
    """Write what a server sends into a file; returns its md5."""
    from tqdm import tqdm

    md5 = hashlib.md5(usedforsecurity=False)
    try:
        # an opener of its own: the one that Python keeps has the proxies of the first time that it was used
        opener = urllib.request.build_opener()
        with opener.open(address, timeout=timeout) as answer, file.open("wb") as out:
            drawn = output.can_draw(sys.stderr)
            bar = tqdm(total=answer.length, desc=name, unit="B", unit_scale=True, disable=not drawn)
            with bar:
                while some := answer.read(CHUNK):
                    out.write(some)
                    md5.update(some)
                    bar.update(len(some))
    except http.client.HTTPException as error:
        raise OSError(type(error).__name__) from error
    return md5.hexdigest()


def _md5(file: Path) -> str | None:
    """None = there is no such file."""
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _unpack(archive: Path, into: Path) -> None:
    """Files and folders only, and only inside of `into`."""
    if not hasattr(tarfile, "data_filter"):
        raise Unusable(f"Python must be 3.11.4 or later to unpack {archive.name} safely")
    try:
        with tarfile.open(archive, "r:gz") as tar:
            tar.extractall(into, filter="data")
    except tarfile.FilterError as error:
        raise Unusable(f"{archive.name} would write outside of its folder ({type(error).__name__})") from error
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise Unusable(f"{archive.name} cannot be unpacked ({type(error).__name__})") from error


def _move(new: Path, folder: Path) -> None:
    """By one rename; into a folder that lacked some, file by file."""
    if not folder.exists():
        os.rename(new, folder)
        return
    for file in new.iterdir():
        os.replace(file, folder / file.name)


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
        with alone(Path(root), folder):
            if not find(root, folder, files):  # no other process has brought them meanwhile
                fetch(Path(root), folder, files, sources(), timeout)
    except (OSError, Unusable) as error:
        of_system = error.strerror if isinstance(error, OSError) and isinstance(error.strerror, str) else ""
        why = str(error) if isinstance(error, Unusable) else of_system or type(error).__name__
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
