"""Files of data sets: find them, download them from their authors, verify md5 sums, explain why one cannot be read."""

import contextlib
import gzip
import hashlib
import http.client
import json
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accordion_bench import locks, output
from accordion_bench.options.checks import ConfigError

CHUNK = 1 << 20  # bytes
Seen = dict[str, list]  # by file name: size, modification time, md5


class Unreadable(ConfigError):
    """A file cannot be read in its expected format; `str()` names the file and the reason."""


def why(file: Path, error: BaseException) -> str:
    """Return the reason for an error raised while a file was read, as a clause that follows the file's name."""
    if isinstance(error, FileNotFoundError):
        return "which is a broken link" if file.is_symlink() else "which no longer exists"
    if isinstance(error, PermissionError):
        return "which may not be read by this user"
    try:
        if file.is_file() and not file.stat().st_size:
            return "which is empty"
    except OSError:  # the folder may not be accessible
        pass
    if isinstance(error, MemoryError):
        return "which is larger than the free memory"
    return f"which cannot be read ({type(error).__name__}: {' '.join(str(error).split())})"


def refusal(what: str, file: Path, reason: str, others: int = 0) -> Unreadable:
    """Return the error for a file that cannot be used.

    Args:
        what: noun for the expected files in the message.
        reason: result of `why`.
        others: number of further files with errors.
    """
    also = f", and {others:,} more like it" if others else ""
    return Unreadable(f"paths.data must hold {what}, got {file}, {reason}{also}; restore or remove that file")


class Unusable(Exception):
    """The download differs from the authors' file; `str()` gives the reason, without a full stop."""


@dataclass(frozen=True)
class Source:
    """File that the authors publish; archives, whose names end in .tar.gz, are unpacked."""

    address: str
    name: str
    md5: str


@contextlib.contextmanager
def alone(root: Path, folder: str) -> Iterator[None]:
    """Lock a folder against downloads by other processes, and delete remains of a killed one; see `locks.locked`."""
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
    """Download files into `root/folder`, all or none. The caller must hold the lock `alone`.

    A source that an earlier attempt left in `root/folder` or `root` is not downloaded again. `sources` are archives of
    `folder`, or the files themselves; `files` are the names that `folder` must contain afterwards.

    Raises:
        Unusable: the download differs from the authors' files.
        OSError: network or disk error, or `timeout` seconds without data.
    """
    part = Path(tempfile.mkdtemp(prefix=f".{folder}.part-", dir=root))
    try:
        new = part / "new" / folder  # one level deeper than `find` searches
        new.mkdir(parents=True)
        for source in sources:
            packed = source.name.endswith(".tar.gz")
            there = [file for file in (root / source.name, root / folder / source.name) if file.is_file()]
            earlier = [file for file in there if _md5(file) == source.md5]
            file = earlier[0] if earlier else _downloaded(source, part if packed else new, timeout)
            if packed:
                _unpack(file, new.parent)
            elif earlier:
                shutil.copyfile(file, new / source.name)
        if missing := [name for name in files if not (new / name).is_file() or (new / name).is_symlink()]:
            raise Unusable(f"{', '.join(source.name for source in sources)} did not contain {', '.join(missing)}")
        _move(new, root / folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _downloaded(source: Source, into: Path, timeout: float) -> Path:
    file = into / source.name
    print(f"downloading {source.name}", file=sys.stderr, flush=True)
    encrypted = source.address.replace("http://", "https://", 1)
    try:
        md5 = _read(encrypted, source.name, file, timeout)
    except OSError:
        if encrypted == source.address:
            raise
        md5 = _read(source.address, source.name, file, timeout)  # safe over http: the md5 is verified
    if md5 != source.md5:
        raise Unusable(f"{source.name} has the md5 {md5} instead of {source.md5}")
    return file


def _read(address: str, name: str, file: Path, timeout: float) -> str:
    """Download an address into a file and return the md5 of its bytes."""
    from tqdm import tqdm

    md5 = hashlib.md5(usedforsecurity=False)
    try:
        # a new opener, because Python's global one keeps the proxy settings of its first use
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


def _md5(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _unpack(archive: Path, into: Path) -> None:
    """Unpack an archive; only files and folders, and only inside `into`."""
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
    """Move a folder by one rename; if the destination exists, file by file."""
    if not folder.exists():
        os.rename(new, folder)
        return
    for file in new.iterdir():
        os.replace(file, folder / file.name)


_failed: dict[tuple[str, str], ConfigError] = {}  # downloads that failed in this process; they are not retried


def find(root: str, folder: str, files: Sequence[str]) -> Path | None:
    """Return the folder that contains all files (`*` as in shells): `root/folder`, `root`, or `root/*/folder`.

    None if no folder contains them; `root` is `paths.data`.
    """
    here = Path(root)
    places = [here / folder, *([here] if here.absolute().name == folder else []), *sorted(here.glob(f"*/{folder}"))]
    return next((place for place in places if all(any(map(Path.is_file, place.glob(name))) for name in files)), None)


def ensure(
    root: str, folder: str, files: Sequence[str], sources: Callable[[], Sequence[Source]], timeout: float
) -> Path:
    """Return the folder that contains the files, see `find`, and download them if any is missing.

    Existing files are not verified. `sources` returns the downloads; it is called only if files are missing. A download
    fails after `timeout` seconds without data from the server.

    Raises:
        ConfigError: files are missing and cannot be downloaded.
    """
    if found := find(root, folder, files):
        return found
    if failed := _failed.get((root, folder)):
        raise failed
    try:
        if not Path(root).exists():
            Path(root).mkdir(parents=True, exist_ok=True)
            print(f"paths.data={root} did not exist and was created; {folder} is downloaded into it", file=sys.stderr)
        with alone(Path(root), folder):
            if not find(root, folder, files):  # another process may have downloaded them meanwhile
                fetch(Path(root), folder, files, sources(), timeout)
    except (OSError, Unusable) as error:
        of_system = error.strerror if isinstance(error, OSError) and isinstance(error.strerror, str) else ""
        why = str(error) if isinstance(error, Unusable) else of_system or type(error).__name__
        _failed[root, folder] = ConfigError(
            f"paths.data must hold the folder {folder}, got {root} without it or with files missing, and downloading "
            f"failed ({why}); type paths.data=FOLDER, or dataset=digits, which needs no download"
        )
        raise _failed[root, folder] from error
    return find(root, folder, files) or Path(root, folder)


def refuse_size(what: str, expected: int, found: int, where: Path) -> None:
    """Refuse files that do not contain the expected number of images."""
    if found != expected:
        raise ConfigError(
            f"paths.data must hold all {expected:,} {what} images, got {found:,} in {where}; type another paths.data, "
            "or remove that folder to download it again"
        )


def not_readable(file: Path, error: Exception) -> ConfigError:
    """Return the error for a file that is not in the original format."""
    return ConfigError(
        f"paths.data must hold the original files, got {file}, which cannot be read ({type(error).__name__}: {error}); "
        "type another paths.data, or remove that file to download it again"
    )


def refuse_changed(folder: Path, published: Mapping[str, str]) -> None:
    """Compare files with their published md5 sums, by name, and refuse files that differ or cannot be read.

    Files with the cached size and modification time are not read again.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accordion_bench" / "md5"
    cache = caches / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]}.json"
    seen, now = _cached(cache), {}
    for name, md5 in published.items():
        try:
            stat = (folder / name).stat()
            as_it_is = [stat.st_size, stat.st_mtime_ns]
            known = seen.get(name, [])
            now[name] = known if known[:2] == as_it_is else [*as_it_is, _md5(folder / name)]
        except OSError as error:
            raise refusal("the original files", folder / name, why(folder / name, error)) from None
        if now[name][2:] != [md5]:
            raise ConfigError(
                f"paths.data must hold the original files, got {folder / name}, whose md5 is {now[name][2]} and not "
                f"{md5}; remove that folder to download it again, or type dataset.check=false to accept it"
            )
    if now != seen:
        _write(cache, now)


def _cached(cache: Path) -> Seen:
    try:
        seen = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    whole = isinstance(seen, dict) and all(isinstance(value, list) and len(value) == 3 for value in seen.values())
    return seen if whole else {}


def _write(cache: Path, seen: Seen) -> None:
    with contextlib.suppress(OSError):  # without a writable cache the files are read each time
        cache.parent.mkdir(parents=True, exist_ok=True)
        part = cache.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(seen), encoding="utf-8")
        os.replace(part, cache)
