"""Files that outlive a power cut, with checksums inside of a run's own text files.

A checksum (CRC-32) tells damage: a flipped digit is as good a digit. A JSON object ends with `"crc32": "0a1b2c3d"`, a
YAML file with the line `# crc32: 0a1b2c3d`; each is of all that stands before its digits. What has none, as files of
earlier versions, is read as it is. A file that is changed on purpose is written without its checksum.
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
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(part: Path, final: Path) -> None:
    """Give what has been written completely its name; a reader sees the old or the new one, whatever happens."""
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


KEY = "crc32"
AT_THE_END = re.compile(r'"([0-9a-f]{8})"\s*\}\s*\Z')
LAST_LINE = re.compile(rf"# {KEY}: ([0-9a-f]{{8}})\s*\Z")
LAST_KEY = re.compile(r'(?:"|^# )([^"\n]*)"?: \Z', re.MULTILINE)
ANY_LAST_LINE = re.compile(r"([0-9a-f]{8})\s*\Z")


class Changed(ValueError):
    """A text is not as it was written."""


def json_text(content: dict[str, Any], indent: int | None = None) -> str:
    """A JSON object with its checksum as the last member."""
    text = json.dumps({**{key: value for key, value in content.items() if key != KEY}, KEY: ""}, indent=indent)
    at = text.rindex('""')
    return f'{text[:at]}"{_of(text[:at])}"{text[at + 2 :]}'


def checked_json(text: str, content: Any) -> Any:
    """What a JSON text means, without its checksum.

    Args:
        text: as it was read.
        content: as it was parsed; loses its checksum.

    Raises:
        Changed: the text has a checksum, and it is another one's.
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
    """Whether the last key before the digits was the checksum's, until one of its letters changed."""
    key = LAST_KEY.search(head)
    return key is not None and _of(f"{head[: key.start(1)]}{KEY}{head[key.end(1) :]}") == digits


def yaml_text(text: str) -> str:
    """A YAML text with its checksum as the last line, a comment."""
    head = f"{text}# {KEY}: "
    return f"{head}{_of(head)}\n"


def check_yaml(text: str) -> None:
    """Look at the checksum of a YAML text, where it has one.

    Raises:
        Changed: it is another one's.
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
