"""Masking of secrets: values named like a key, token, secret or password, and passwords within addresses.

Reports and environment.json contain only masked values. A run's own config.yaml is not masked, because the run is
resumed from it.
"""

import enum
import re
import shlex
from collections.abc import Iterator
from typing import Any

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
BRACKETS = {"[": "]", "{": "}", "(": ")"}


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
    """Return where a value ends: at its closing quotation mark or bracket, else before the next item or word."""
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
    """Whether a value under a name of this kind is a secret."""
    if kind is SecretKind.SHOWN or value.lower() in WORDS:
        return False
    return kind is SecretKind.SECRET or not NUMBERS.fullmatch(value)
