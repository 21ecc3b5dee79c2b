"""Files that outlive a power cut, and what is said where there is no room for them."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from accordion_bench.options.checks import ConfigError, as_typed


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(part: Path, final: Path) -> None:
    """Give what has been written completely its name; whoever reads sees the old or the new one, whatever happens."""
    sync(part)
    os.replace(part, final)
    sync(final.parent)


def new_file(path: Path) -> BinaryIO:
    """A new file to write; whatever has its name (a link of another user, say) is removed and never followed."""
    path.unlink(missing_ok=True)
    return path.open("xb")  # O_EXCL follows no link


def write_text(path: Path, text: str) -> None:
    """Write a file as a whole."""
    part = path.with_name(f"{path.name}.part")
    with new_file(part) as file:
        file.write(text.encode())
    replace(part, path)


def append_line(path: Path, line: str) -> None:
    """Append one line, never behind the end of another: a file that a crash has cut off does not end with one.

    Raises:
        OSError: it is no regular file, or cannot be written.
    """
    with os.fdopen(to_append(path), "ab") as file:
        size = os.fstat(file.fileno()).st_size
        begun = size and os.pread(file.fileno(), 1, size - 1) != b"\n"
        file.write((b"\n" if begun else b"") + line.encode() + b"\n")


def to_append(path: str | Path, flags: int = os.O_RDWR | os.O_APPEND | os.O_CREAT) -> int:
    """A descriptor of a regular file; no link is followed, and no reader of a pipe is waited for.

    Raises:
        OSError: it is a pipe, a folder, a link, ...
    """
    found = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "no regular file", str(path))
    return found


@contextlib.contextmanager
def room(run: Path) -> Iterator[None]:
    """Around what is written into a run folder.

    Raises:
        ConfigError: the system has refused it: the disk is full, say.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        what = f"{error.strerror} ({error.filename or run})"
        again = f"mend that, and type {as_typed('resume', str(run))} to go on from the last checkpoint"
        raise ConfigError(
            f"{run} must be a folder that takes what the run writes, got: {what}; "
            f"{again if run.is_dir() else 'type paths.runs=FOLDER, another one'}"
        ) from error
