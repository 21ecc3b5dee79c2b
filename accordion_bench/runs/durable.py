"""Durable file writes, and checksums embedded in a run's own text files.

A checksum (CRC-32) detects damage that parsing does not, such as a changed digit. A JSON object ends with
`"crc32": "0a1b2c3d"`, a YAML file with the line `# crc32: 0a1b2c3d`; each covers all text before its digits. A file
without a checksum, as earlier versions wrote it, is read unchecked. To change a file on purpose, remove its checksum.
"""

import contextlib
import errno
import json
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from accordion_bench.options.checks import ConfigError, as_typed


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(part: Path, final: Path) -> None:
    """Rename a complete file to its final name, atomically and durably; a reader sees the old or the new one."""
    sync(part)
    os.replace(part, final)
    sync(final.parent)


def new_file(path: Path) -> BinaryIO:
    """Open a new file for writing; an existing one, for instance another user's link, is removed and never followed."""
    path.unlink(missing_ok=True)
    return path.open("xb")  # O_EXCL follows no link


def write_text(path: Path, text: str) -> None:
    """Write a whole file atomically and durably."""
    part = path.with_name(f"{path.name}.part")
    with new_file(part) as file:
        file.write(text.encode())
    replace(part, path)


def append_line(path: Path, line: str) -> None:
    """Append one line, first ending an incomplete last line that a crash may have left.

    Raises:
        OSError: it is not a regular file, or cannot be written.
    """
    with os.fdopen(to_append(path), "ab") as file:
        size = os.fstat(file.fileno()).st_size
        begun = size and os.pread(file.fileno(), 1, size - 1) != b"\n"
        file.write((b"\n" if begun else b"") + line.encode() + b"\n")


def to_append(path: str | Path, flags: int = os.O_RDWR | os.O_APPEND | os.O_CREAT) -> int:
    """Open a regular file with `flags` of `os.open`; never follow a link or wait for the reader of a pipe.

    Returns:
        the descriptor.

    Raises:
        OSError: it is a pipe, a folder, a link, ...
    """
    found = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        os.close(found)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return found


@contextlib.contextmanager
def room(run: Path) -> Iterator[None]:
    """Context in which a run folder is written: an error of the file system becomes a `ConfigError`.

    Raises:
        ConfigError: the system refused a write, for instance because the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        what = f"{error.strerror} ({error.filename or run})"
        again = f"fix that, and type {as_typed('resume', str(run))} to continue from the last checkpoint"
        raise ConfigError(
            f"{run} must be a folder that the run can write to, got: {what}; "
            f"{again if run.is_dir() else 'type paths.runs=FOLDER, another one'}"
        ) from error


KEY = "crc32"
AT_THE_END = re.compile(r'"([0-9a-f]{8})"\s*\}\s*\Z')
LAST_LINE = re.compile(rf"# {KEY}: ([0-9a-f]{{8}})\s*\Z")
LAST_KEY = re.compile(r'(?:"|^# )([^"\n]*)"?: \Z', re.MULTILINE)
ANY_LAST_LINE = re.compile(r"([0-9a-f]{8})\s*\Z")


class Changed(ValueError):
    """A text does not match its checksum."""


def json_text(content: dict[str, Any], indent: int | None = None) -> str:
    """Return a JSON object with its checksum as the last member."""
    text = json.dumps({**{key: value for key, value in content.items() if key != KEY}, KEY: ""}, indent=indent)
    at = text.rindex('""')
    return f'{text[:at]}"{_of(text[:at])}"{text[at + 2 :]}'


def checked_json(text: str, content: Any) -> Any:
    """Verify the checksum of a JSON text, if it has one; return the parsed content, without it (removed in place).

    Raises:
        Changed: the checksum does not match.
    """
    if not isinstance(content, dict):
        return content
    found = AT_THE_END.search(text)
    if KEY not in content:
        if found and _renamed(text[: found.start()], found[1]):
            raise Changed
        return content
    if not found or found[1] != content[KEY] or found[1] != _of(text[: found.start()]):
        raise Changed
    del content[KEY]
    return content


def _renamed(head: str, digits: str) -> bool:
    """Whether the digits are a valid checksum whose key is damaged, so that it is no longer found by its name."""
    key = LAST_KEY.search(head)
    return key is not None and _of(f"{head[: key.start(1)]}{KEY}{head[key.end(1) :]}") == digits


def yaml_text(text: str) -> str:
    """Return a YAML text with its checksum as the last line, a comment."""
    head = f"{text}# {KEY}: "
    return f"{head}{_of(head)}\n"


def check_yaml(text: str) -> None:
    """Verify the checksum of a YAML text, if it has one.

    Raises:
        Changed: the checksum does not match.
    """
    last = text[text.rstrip().rfind("\n") + 1 :]
    if KEY not in last:
        found = ANY_LAST_LINE.search(text)
        if found and _renamed(text[: found.start()], found[1]):
            raise Changed
        return
    found = LAST_LINE.search(text)
    if not found or found[1] != _of(text[: found.start(1)]):
        raise Changed


def _of(text: str) -> str:
    return f"{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"
