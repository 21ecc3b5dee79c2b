"""Compare files with their published md5 sums; results are cached, so that unchanged files are read once."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from accordion_bench.datasets.unreadable import refusal, why
from accordion_bench.options.checks import ConfigError

Seen = dict[str, list]  # file name: [size, modification time, md5]


def refuse_changed(folder: Path, published: Mapping[str, str]) -> None:
    """Compare files with their published md5 sums. Files with the cached size and modification time are not read again.

    Args:
        folder: folder of the files.
        published: md5 by file name.

    Raises:
        ConfigError: a file differs, or cannot be read.
    """
    cache = _cache_folder() / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]}.json"
    seen, now = _read(cache), {}
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


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accordion_bench" / "md5"


def _md5(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _read(cache: Path) -> Seen:
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
