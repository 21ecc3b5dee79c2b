"""Files of a run folder, which may come from anywhere: read within limits, or refused in one sentence.

Only regular files are read, so that nothing waits for a pipe or a device. Depth and size are looked at before anything
is built: PyYAML's and json's own recursion, and what aliases stand for, have no end that a process survives.

What they say is made printable once, where it is read: nothing later has to look at it again. A name with a newline
would be a line of its own in a table, one with an escape sequence a command to the terminal, one that is half of a
character (a surrogate) could not be written at all.
"""

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accordion_bench.runs import durable

SMALL = 4 << 20  # bytes, of config.yaml, summary.json, environment.json, a manifest
LARGE = 256 << 20  # bytes, of metrics.jsonl: thirty times as many as a long run with all columns has written
VALUES = 10_000_000  # of metrics.jsonl
DEPTH = 50  # of lists and mappings inside each other
NODES = 50_000  # of config.yaml, with what its aliases stand for
DIGITS = 300  # of a number; more are beyond what a float holds
STRINGS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
BRACKETS = re.compile(r"[\[\]{}]")


class Refused(ValueError):
    """A file that is not read; `str()` says why, with the file's name."""


class NotAsWritten(Refused):
    """A file, or a line of one, whose checksum says that something else than the run has changed it."""


def read_bytes(file: Path, most: int | None = SMALL) -> bytes:
    """All of a regular file.

    Args:
        file: or a link to one.
        most: bytes that it may have; None = any number.

    Raises:
        OSError: there is none, or it must not be read.
        Refused: it is no regular file, or larger.
    """
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise Refused(f"{file.name} is no regular file")
    with open(file, "rb", opener=_at_once) as stream:
        size = os.fstat(stream.fileno()).st_size
        data = stream.read(-1 if most is None else most + 1) if most is None or size <= most else b""
    size = max(size, len(data))
    if most is not None and size > most:
        raise Refused(f"{file.name} has {size:,} bytes; at most {most:,} are read")
    return data


def _at_once(path: str, flags: int) -> int:
    """Open without waiting, should the file have become a pipe since it was looked at."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_first_line(file: Path, most: int = SMALL) -> str:
    """The first line of a text file, whatever the file's size; without its end.

    Args:
        file: or a link to one.
        most: bytes that it may have.

    Raises:
        OSError: there is none, or it must not be read.
        ValueError: it is no UTF-8.
        Refused: it is no regular file, or its first line is longer.
    """
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise Refused(f"{file.name} is no regular file")
    with open(file, "rb", opener=_at_once) as stream:
        line = stream.readline(most + 1)
    if len(line) > most:
        raise Refused(f"the first line of {file.name} has more than {most:,} bytes")
    return line.decode("utf-8").rstrip("\r\n")


def read_text(file: Path) -> str:
    """A small text file.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    return read_bytes(file).decode("utf-8")


def read_yaml(file: Path) -> Any:
    """What a YAML file holds.

    Raises:
        OSError, ValueError: it cannot be read, or is not as it was written.
        yaml.YAMLError: it is no YAML.
    """
    import yaml

    text, loader = read_text(file), getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C one: ten times as fast
    with _as_written(file.name):
        durable.check_yaml(text)
    _check_events(yaml.parse(text, loader), file.name)
    try:
        return yaml.load(text, loader)
    except (ValueError, yaml.YAMLError):
        raise
    except Exception as error:  # whatever PyYAML's constructors meet in `!!bool x`, `!!timestamp x`, `!!int ""`
        raise Refused(f"{file.name} holds a value of another type than it says ({type(error).__name__})") from None


def read_json(file: Path) -> Any:
    """What a JSON file holds, without its checksum.

    Raises:
        OSError, ValueError: it cannot be read, is no JSON, or is not as it was written.
    """
    return parse_json(read_text(file), file.name)


def read_lines(file: Path, most: int | None = LARGE) -> Iterator[tuple[str, Any]]:
    """The lines of a JSONL file and what they hold, without checksums, up to the first that is cut off, or no JSON.

    Args:
        file: to read.
        most: bytes that it may have; None = any number, of any number of values.

    Raises:
        OSError, Refused: it cannot be read, or a line is not as it was written.
    """
    for number, line in enumerate(split_lines(file, most), 1):
        try:
            value = parse_json(line, f"line {number} of {file.name}")
        except NotAsWritten:
            raise
        except ValueError:
            return
        yield line, value


def split_lines(file: Path, most: int | None = LARGE) -> list[str]:
    """The lines of a text file; what is no UTF-8 is replaced.

    Args:
        file: to read.
        most: as for `read_lines`.

    Raises:
        OSError, Refused: it cannot be read.
    """
    text = read_bytes(file, most).decode("utf-8", errors="replace")
    if most is not None and len(text) > VALUES and sum(map(text.count, ",[{")) > VALUES:
        raise Refused(f"{file.name} holds more than {VALUES:,} values")
    return text.splitlines()


def parse_json(text: str, name: str = "it") -> Any:
    """What a JSON text means, without its checksum.

    Args:
        text: of a file or a line.
        name: of its file or line, for the sentence.

    Raises:
        ValueError: it is no JSON, nested too deeply, or not as it was written.
    """
    if text.count("[") + text.count("{") > DEPTH and _is_deep(text):
        raise Refused(f"{name} is nested deeper than {DEPTH}")
    with _as_written(name):
        return durable.checked_json(text, json.loads(text))


@contextlib.contextmanager
def _as_written(name: str) -> Iterator[None]:
    try:
        yield
    except durable.Changed:
        raise NotAsWritten(f"{name} is not as it was written: its checksum is another one's") from None


def _is_deep(text: str) -> bool:
    """Whether too many brackets are open at once; those in strings are none."""
    depth = 0
    for bracket in BRACKETS.finditer(STRINGS.sub("", text)):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > DEPTH:
            return True
    return False


def _check_events(events: Iterator[Any], name: str) -> None:
    """Refuse YAML that is too deep or too large, an alias counted as all that it stands for.

    Raises:
        Refused: it is.
    """
    import yaml

    nodes = 0
    sizes: dict[str | None, int | None] = {}  # by anchor; None = still open
    opened: list[tuple[str | None, int]] = []  # anchor of each open list or mapping, and the nodes before it
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, nodes))
            sizes[event.anchor] = None
            nodes += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            sizes[anchor] = nodes - before
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = 1
            nodes += 1
            if not event.implicit[1] and len(event.value) > DIGITS and event.value[0] in "+-.0123456789":  # not quoted
                raise Refused(f"{name} holds a number of {len(event.value):,} characters")
        elif isinstance(event, yaml.AliasEvent):
            stands_for = sizes.get(event.anchor, 1)
            if stands_for is None:
                raise Refused(f"{name} holds a list or mapping that is inside itself")
            nodes += stands_for
        if len(opened) > DEPTH:
            raise Refused(f"{name} is nested deeper than {DEPTH}")
        if nodes > NODES:
            raise Refused(f"{name} holds more than {NODES:,} values")


NAME, SENTENCE, TEXT = 200, 1000, 10_000  # letters that are kept: of labels, of keys, of texts such as a command
LARGEST_INTEGER = 2**63  # of integers; what is larger becomes a float, which may be infinite


def printable(text: str, longest: int = NAME) -> str:
    """One line of what can be seen: white space as spaces, anything else that cannot be seen as question marks.

    Args:
        text: from anywhere.
        longest: letters, after which ... stands.
    """
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def plain(content: Any) -> Any:
    """What a JSON or YAML file holds, as dict, list, str, int, float, bool and None only; texts and keys printable.

    YAML knows dates, sets and bytes, too, which are texts here, and keys of any kind.
    """
    if isinstance(content, str):
        return printable(content, TEXT)
    if isinstance(content, dict):
        return {printable(str(key), SENTENCE): plain(value) for key, value in content.items()}
    if isinstance(content, list):
        return [plain(item) for item in content]
    if isinstance(content, int) and not isinstance(content, bool) and abs(content) > LARGEST_INTEGER:
        return _as_float(content)
    if content is None or isinstance(content, bool | int | float):
        return content
    return printable(str(content), TEXT)


def _as_float(number: int) -> float:
    try:
        return float(number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def needs_no_look(json_text: str) -> bool:
    """Whether no text in valid JSON can be unprintable, which is seen without parsing it.

    Control characters are no valid JSON, and json.dumps writes every other odd character as an escape sequence: rows of
    our own runs, which may be millions of values, are never looked through.
    """
    return json_text.isascii() and "\\" not in json_text and "\x7f" not in json_text
