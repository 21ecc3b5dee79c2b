"""Safe reading of untrusted run folders within limits of size and depth, printable texts, and masking of secrets.

Only regular files are read, so that no read blocks on a pipe or a device. Depth and size are checked before anything is
parsed, because PyYAML and json recurse without a limit and YAML aliases can expand to any size.

Texts are made printable once, when they are read, so later code need not check them. In a table a newline in a name
would start another line; an escape sequence would be a command to the terminal; a lone surrogate cannot be encoded.

Secrets are values named like a key, token, secret or password, and passwords within addresses. Reports and
environment.json contain only masked values. A run's own config.yaml is not masked, because the run is resumed from it.
"""

import contextlib
import enum
import json
import os
import re
import shlex
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from accordion_bench.runs import durable

SMALL = 4 << 20  # bytes; limit of config.yaml, summary.json, environment.json, a manifest
LARGE = 256 << 20  # bytes; limit of metrics.jsonl: thirty times the size that a long run with all columns wrote
VALUES = 10_000_000  # values; limit of metrics.jsonl
DEPTH = 50  # levels of nested lists and mappings
NODES = 50_000  # values; limit of config.yaml, with expanded aliases
DIGITS = 300  # characters; limit of a number: longer ones exceed a float
STRINGS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
BRACKETS = re.compile(r"[\[\]{}]")


class Refused(ValueError):
    """A file is not read; `str()` gives the reason with the file's name."""


class NotAsWritten(Refused):
    """The checksum of a file, or of a line, does not match: something else than the run has changed it."""


def read_bytes(file: Path, most: int | None = SMALL) -> bytes:
    """Read a regular file, or a link to one, of at most `most` bytes; None = unlimited.

    Raises:
        OSError: the file does not exist, or reading it is not permitted.
        Refused: it is not a regular file, or it is too large.
    """
    with _opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        data = stream.read(-1 if most is None else most + 1) if most is None or size <= most else b""
    size = max(size, len(data))
    if most is not None and size > most:
        raise Refused(f"{file.name} has {size:,} bytes; at most {most:,} are read")
    return data


def _opened(file: Path) -> BinaryIO:
    """Open a regular file, without blocking in case it becomes a pipe after it was checked."""
    if not stat.S_ISREG(os.stat(file).st_mode):
        raise Refused(f"{file.name} is no regular file")
    return open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))


def read_first_line(file: Path, most: int = SMALL) -> str:
    """Read the first line, of at most `most` bytes, of a text file of any size, without the line end.

    Raises:
        OSError: the file does not exist, or reading it is not permitted.
        ValueError: the line is not UTF-8.
        Refused: it is not a regular file, or its first line is too long.
    """
    with _opened(file) as stream:
        line = stream.readline(most + 1)
    if len(line) > most:
        raise Refused(f"the first line of {file.name} has more than {most:,} bytes")
    return line.decode("utf-8").rstrip("\r\n")


def read_text(file: Path) -> str:
    """Read a text file of at most `SMALL` bytes.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    return read_bytes(file).decode("utf-8")


def read_yaml(file: Path) -> Any:
    """Read and parse a YAML file.

    Raises:
        OSError, ValueError: it cannot be read, or its checksum does not match.
        yaml.YAMLError: it is not YAML.
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
    except Exception as error:  # PyYAML's constructors raise various errors for `!!bool x`, `!!timestamp x`, `!!int ""`
        raise Refused(f"{file.name} holds a value that does not match its tag ({type(error).__name__})") from None


def read_json(file: Path) -> Any:
    """Read and parse a JSON file; the checksum is removed.

    Raises:
        OSError, ValueError: it cannot be read, is not JSON, or its checksum does not match.
    """
    return parse_json(read_text(file), file.name)


def read_lines(file: Path, most: int | None = LARGE) -> Iterator[tuple[str, Any]]:
    """Yield the lines of a JSONL file and their parsed content without checksums, up to the first incomplete line.

    The file has at most `most` bytes; None = unlimited size and number of values.

    Raises:
        OSError, Refused: it cannot be read, or the checksum of a line does not match.
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
    """Read the lines of a text file, with `most` as for `read_lines`; invalid UTF-8 is replaced.

    Raises:
        OSError, Refused: it cannot be read.
    """
    text = read_bytes(file, most).decode("utf-8", errors="replace")
    if most is not None and len(text) > VALUES and sum(map(text.count, ",[{")) > VALUES:
        raise Refused(f"{file.name} holds more than {VALUES:,} values")
    return text.splitlines()


def parse_json(text: str, name: str = "it") -> Any:
    """Parse a JSON text, named `name` in error messages; the checksum is removed.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or its checksum does not match.
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
        raise NotAsWritten(f"{name} is not as it was written: its checksum does not match") from None


def _is_deep(text: str) -> bool:
    """Whether brackets outside strings are nested too deeply."""
    depth = 0
    for bracket in BRACKETS.finditer(STRINGS.sub("", text)):
        depth += 1 if bracket[0] in "[{" else -1
        if depth > DEPTH:
            return True
    return False


def _check_events(events: Iterator[Any], name: str) -> None:
    """Refuse YAML that is too deep or too large, where an alias counts as all values that it expands to."""
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
                raise Refused(f"{name} holds a list or mapping that contains itself")
            nodes += stands_for
        if len(opened) > DEPTH:
            raise Refused(f"{name} is nested deeper than {DEPTH}")
        if nodes > NODES:
            raise Refused(f"{name} holds more than {NODES:,} values")


NAME, SENTENCE, TEXT = 200, 1000, 10_000  # largest lengths: of labels, of keys, of texts such as a command
LARGEST_INTEGER = 2**63  # a larger integer becomes a float, which may be infinite


def printable(text: str, longest: int = NAME) -> str:
    """Return one printable line: white space becomes spaces, other unprintable characters become question marks.

    A text longer than `longest` characters is cut and ends with an ellipsis.
    """
    if len(text) > longest:
        text = text[: longest - 1] + "…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def plain(content: Any) -> Any:
    """Reduce parsed JSON or YAML to dict, list, str, int, float, bool and None; make texts and keys printable.

    YAML also has dates, sets and bytes, which become texts, and keys of any type.
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


def is_printable_json(json_text: str) -> bool:
    """Whether no text in valid JSON can be unprintable, decided without parsing it.

    Valid JSON has no control characters, and json.dumps escapes every other unprintable character. So rows written by
    this package, which may be millions of values, need no check.
    """
    return json_text.isascii() and "\\" not in json_text and "\x7f" not in json_text


# ---- secrets

MASK = "***"
# in a name, in any case; `tokenizer`, `keyword` and `author` do not match
KEY_OR_TOKEN = re.compile(r"key(?!board|ed\b|error|frame|point|word)|token(?!i[sz])", re.IGNORECASE)
NEVER_SHOWN = re.compile(
    r"secret|passw(?:or)?d|pass_?phrase|credential|(?<![a-z])(?:pw|pwd|o?auth|authorization|bearer|cookie)(?![a-z])",
    re.IGNORECASE,
)
# names that count keys or tokens (max_tokens, num_key_value_heads, pad_token_id): their numbers are not secret
COUNTS = re.compile(
    r"(?:keys|tokens)(?![a-z])|(?:^|[._-])(?:max|min|num|n)[._-]|[._-]?(?:count|dim|ids?|len|length|limit|size)$",
    re.IGNORECASE,
)
NUMBERS = re.compile(r"[-+\d.e,\s\[\]]+")
WORDS = ("", "true", "false", "null", "none", MASK)  # which reveal nothing

NAMED = re.compile(r"""(?<![\w.\-])([\w.\-]+)["']?\s*[=:]\s*""")  # a name before its value, anywhere in a text
KEY = re.compile(r"[+~]*[\w.@/-]+")  # of an override, an option or a variable
HEADERS = re.compile(r"authorization|cookie", re.IGNORECASE)  # whose values have several words
OF_LINE, OF_WORD, OF_ITEM = re.compile(r"""[^\n"']*"""), re.compile(r"[^\s,}\])&;]+"), re.compile(r"[^,}\])]+")
BEARER = re.compile(r"(?i)(?<![\w-])(bearer\s+)([\w.~+/=-]+)")
# user:PASS@host, with or without a scheme; and TOKEN@host of a web address
ADDRESS = re.compile(
    r"(?P<user>(?:\b[a-z][a-z0-9+.-]{0,30}://|(?<![\w.%+/:@-]))[\w.%+-]{0,200}:)(?!//)[^/\s]{1,4000}@(?=[\w\[])",
    re.IGNORECASE,
)
WEB = re.compile(r"(https?://)[^/\s@:]+@(?=[\w\[])", re.IGNORECASE)
CLOSING = {"[": "]", "{": "}", "(": ")"}


class SecretKind(enum.IntEnum):
    """How the name of a value decides whether the value is masked."""

    SHOWN = 0
    NUMBERS_SHOWN = 1  # the name counts keys or tokens
    SECRET = 2


def kind_of(name: object) -> SecretKind:
    """Return how to treat the value of an option or variable of this name."""
    if not isinstance(name, str):
        return SecretKind.SHOWN
    if NEVER_SHOWN.search(name):
        return SecretKind.SECRET
    if KEY_OR_TOKEN.search(name):
        return SecretKind.NUMBERS_SHOWN if COUNTS.search(name) else SecretKind.SECRET
    return SecretKind.SHOWN


def masked(content: Any, name: str = "", above: SecretKind = SecretKind.SHOWN) -> Any:
    """Return nested mappings and lists with every secret replaced by ***, including all values below a secret's name.

    `name` is the key of the content, `above` the kind of the enclosing keys.
    """
    kind = max(above, kind_of(name))
    if isinstance(content, dict):
        return {key: masked(value, str(key), kind) for key, value in content.items()}
    if isinstance(content, list):
        return [masked(item, "", kind) for item in content]
    if isinstance(content, str):
        return MASK if _hides(kind, content) else masked_text(content)
    return MASK if kind is SecretKind.SECRET and type(content) in (int, float) else content


def masked_command(command: str) -> str:
    """Return a command line, quoted for a shell, with every secret replaced by ***; unchanged if it contains none."""
    try:
        words = shlex.split(command)
    except ValueError:  # an unclosed quotation mark
        return masked_text(command)
    shown, before = [], ""
    for word in words:
        name, equals, value = word.partition("=")
        follows = before.startswith("--") and "=" not in before and not word.startswith("-")
        if follows and _hides(kind_of(before), word):
            shown.append(MASK)
        elif equals and KEY.fullmatch(name) and _hides(kind_of(name), value):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(masked_text(word))
        before = word
    return command if shown == words else shlex.join(shown)


def masked_text(text: str) -> str:
    """Mask secrets in a text: `tracker={api_key:abc,mode:online}`, addresses with passwords, HTTP headers, ..."""
    parts, shown_until = [], 0
    for start, end in _values(text):
        parts += [text[shown_until:start], MASK]
        shown_until = end
    text = "".join([*parts, text[shown_until:]])
    text = BEARER.sub(rf"\g<1>{MASK}", text)
    if "@" not in text:
        return text
    return WEB.sub(rf"\g<1>{MASK}@", ADDRESS.sub(rf"\g<user>{MASK}@", text))


def _values(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each secret value in a text."""
    at, depth = 0, 0
    for named in NAMED.finditer(text):
        start = named.end()
        if named.start() < at:
            continue
        inside = text[at : named.start()]
        depth += sum(map(inside.count, CLOSING)) - sum(map(inside.count, CLOSING.values()))
        at = named.start()
        kind = kind_of(named[1])
        if kind is SecretKind.SHOWN:
            continue
        end = _end_of_value(text, start, OF_LINE if HEADERS.search(named[1]) else OF_ITEM if depth > 0 else OF_WORD)
        if _hides(kind, text[start:end].strip("\"'")):
            yield start, end
            at = end


def _end_of_value(text: str, start: int, plain: re.Pattern[str]) -> int:
    """Return where a value ends: at its closing quotation mark or bracket, else before the next item or word."""
    opened: list[str] = []
    quote = ""
    if text[start : start + 1] not in ("'", '"', *CLOSING):
        found = plain.match(text, start)
        return found.end() if found else start
    at = start
    while at < len(text):
        letter = text[at]
        at += 1
        if quote:
            if letter == "\\":
                at += 1
            elif letter == quote:
                quote = ""
        elif letter in "'\"":
            quote = letter
        elif letter in CLOSING:
            opened.append(CLOSING[letter])
        elif opened and letter == opened[-1]:
            opened.pop()
        if not quote and not opened:
            return at
    return len(text)


def _hides(kind: SecretKind, value: str) -> bool:
    """Whether a value under a name of this kind is a secret."""
    if kind is SecretKind.SHOWN or value.lower() in WORDS:
        return False
    return kind is SecretKind.SECRET or not NUMBERS.fullmatch(value)
