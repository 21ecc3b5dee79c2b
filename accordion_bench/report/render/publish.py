"""A report appears as a whole, or not at all: whatever happens before its last file, the old one stays as it is."""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from accordion_bench.runs import durable

INDEX = ("report.html", "README.md")  # replaced last, in this order: they say what the other files are
PREFIX = ".report-"
DAY = 86400  # seconds, after which nobody is writing a report any more


@contextlib.contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A folder inside of `out` for a new report, whose files then take the place of those of the old one.

    Each is synced and renamed, so that there is never a torn one. Files that the new report does not have stay.

    Args:
        out: folder of reports; made where missing.

    Raises:
        OSError: it takes no files.
    """
    out.mkdir(parents=True, exist_ok=True)
    _remove_left_behind(out)
    new = Path(tempfile.mkdtemp(prefix=PREFIX, dir=out))
    try:
        yield new
        files = sorted(new.iterdir(), key=lambda file: (_rank(file), file.name))
        for file in files:
            durable.sync(file)
        for file in files:
            os.replace(file, out / file.name)
        durable.sync(out)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _rank(file: Path) -> int:
    return INDEX.index(file.name) + 1 if file.name in INDEX else 0


def _remove_left_behind(out: Path) -> None:
    """New reports of processes that were killed."""
    for folder in out.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > DAY:
                shutil.rmtree(folder, ignore_errors=True)
