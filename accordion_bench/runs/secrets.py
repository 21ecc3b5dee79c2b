"""What others should not read: values named like a key, token, secret or password, and passwords within addresses.

What is masked is in no report and in no environment.json; a run's own config.yaml holds what the run was told, because
the run is continued from it.
"""

import enum
import re
import shlex
from collections.abc import Iterator
from typing import Any

MASK = "***"
# in a name, in any case; `tokenizer`, `keyword` and `author` are none
KEY_OR_TOKEN = re.compile(r"key(?!board|ed\b|error|frame|point|word)|token(?!i[sz])", re.IGNORECASE)
NEVER_SHOWN = re.compile(
    r"secret|passw(?:or)?d|pass_?phrase|credential|(?<![a-z])(?:pw|pwd|o?auth|authorization|bearer|cookie)(?![a-z])",
    re.IGNORECASE,
)
# a name that counts keys or tokens: max_tokens, num_key_value_heads, pad_token_id; its numbers are no secrets
COUNTS = re.compile(
    r"(?:keys|tokens)(?![a-z])|(?:^|[._-])(?:max|min|num|n)[._-]|[._-]?(?:count|dim|ids?|len|length|limit|size)$",
    re.IGNORECASE,
)
NUMBERS = re.compile(r"[-+\d.e,\s\[\]]+")
WORDS = ("", "true", "false", "null", "none", MASK)  # which tell nothing

NAMED = re.compile(r"""(?<![\w.\-])([\w.\-]+)["']?\s*[=:]\s*""")  # a name before its value, anywhere in a text
KEY = re.compile(r"[+~]*[\w.@/-]+")  # of an override, an option or a variable
HEADERS = re.compile(r"authorization|cookie", re.IGNORECASE)  # whose values are several words
OF_LINE, OF_WORD, OF_ITEM = re.compile(r"""[^\n"']*"""), re.compile(r"[^\s,}\])&;]+"), re.compile(r"[^,}\])]+")
BEARER = re.compile(r"(?i)(?<![\w-])(bearer\s+)([\w.~+/=-]+)")
# user:PASS@host, with a scheme or without; and TOKEN@host of a web address
ADDRESS = re.compile(
    r"(?P<user>(?:\b[a-z][a-z0-9+.-]{0,30}://|(?<![\w.%+/:@-]))[\w.%+-]{0,200}:)(?!//)[^/\s]{1,4000}@(?=[\w\[])",
    re.IGNORECASE,
)
WEB = re.compile(r"(https?://)[^/\s@:]+@(?=[\w\[])", re.IGNORECASE)
BRACKETS = {"[": "]", "{": "}", "(": ")"}


class SecretKind(enum.IntEnum):
    """What a name says of its value."""

    SHOWN = 0
    NUMBERS_SHOWN = 1  # it counts keys or tokens
    SECRET = 2


def kind_of(name: object) -> SecretKind:
    """What the name of an option or variable says of its value."""
    if not isinstance(name, str):
        return SecretKind.SHOWN
    if NEVER_SHOWN.search(name):
        return SecretKind.SECRET
    if KEY_OR_TOKEN.search(name):
        return SecretKind.NUMBERS_SHOWN if COUNTS.search(name) else SecretKind.SECRET
    return SecretKind.SHOWN


def masked(content: Any, name: str = "", above: SecretKind = SecretKind.SHOWN) -> Any:
    """Nested mappings and lists, with every secret in them as ***; all that stands below a secret's name is one.

    Args:
        content: whatever JSON or YAML holds.
        name: under which it stands.
        above: what the names above say.
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
    """A command line with every secret as ***; without one as it is.

    Args:
        command: quoted for a shell.
    """
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation that does not end
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
    """Any text, such as `tracker={api_key:abc,mode:online}`, an address with a password, or a header of HTTP."""
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
    """Where the values of secrets begin and end in a text."""
    at, depth = 0, 0
    for named in NAMED.finditer(text):
        start = named.end()
        if named.start() < at:
            continue
        inside = text[at : named.start()]
        depth += sum(map(inside.count, BRACKETS)) - sum(map(inside.count, BRACKETS.values()))
        at = named.start()
        kind = kind_of(named[1])
        if kind is SecretKind.SHOWN:
            continue
        end = _end_of_value(text, start, OF_LINE if HEADERS.search(named[1]) else OF_ITEM if depth > 0 else OF_WORD)
        if _hides(kind, text[start:end].strip("\"'")):
            yield start, end
            at = end


def _end_of_value(text: str, start: int, plain: re.Pattern[str]) -> int:
    """Where a value ends: with its quotation, or its last bracket, else where another item or word begins."""
    opened: list[str] = []
    quote = ""
    if text[start : start + 1] not in ("'", '"', *BRACKETS):
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
        elif letter in BRACKETS:
            opened.append(BRACKETS[letter])
        elif opened and letter == opened[-1]:
            opened.pop()
        if not quote and not opened:
            return at
    return len(text)


def _hides(kind: SecretKind, value: str) -> bool:
    """Whether a value is a secret, under a name of this kind."""
    if kind is SecretKind.SHOWN or value.lower() in WORDS:
        return False
    return kind is SecretKind.SECRET or not NUMBERS.fullmatch(value)
