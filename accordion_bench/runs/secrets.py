"""What nobody else should read: values of options and variables that are named like a key, token, secret or password.

What is masked is in no report and in no environment.json; a run's own config.yaml holds what the run was told, because
the run is continued from it.
"""

import re
import shlex
from typing import Any

MASK = "***"
# in a name, in any case; `tokenizer` and `keyword` are none
COUNTED = re.compile(r"key(?!board|ed\b|frame|point|word)|token(?!i[sz])", re.IGNORECASE)  # of which there are numbers
NEVER_SHOWN = re.compile(r"secret|passw(?:or)?d|credential", re.IGNORECASE)
NAMED = re.compile(r"""(?<![\w.\-])([\w.\-]+)["']?\s*[=:]\s*""")  # a name before its value, anywhere in a text
VALUE = re.compile(r""""[^"]*"|'[^']*'|[^\s,}\]&]+""")
NUMBERS = re.compile(r"[-+\d.e,\s\[\]]+")
WORDS = ("", "true", "false", "null", "none", MASK)  # which say nothing to anybody


def is_secret(name: object, value: object) -> bool:
    """Whether an option or variable of this name keeps a secret in this value."""
    if not isinstance(name, str) or not isinstance(value, str) or value.lower() in WORDS:
        return False
    counted = COUNTED.search(name) and not NUMBERS.fullmatch(value)
    return bool(counted or NEVER_SHOWN.search(name))


def masked(content: Any, name: str = "") -> Any:
    """Nested mappings and lists, with every secret in them as ***.

    Args:
        content: whatever JSON or YAML holds.
        name: under which it stands.
    """
    if isinstance(content, dict):
        return {key: masked(value, str(key)) for key, value in content.items()}
    if isinstance(content, list):
        return [masked(item, name) for item in content]
    return MASK if is_secret(name, content) else content


def masked_command(command: str) -> str:
    """A command line with every secret as ***; without one as it is.

    Args:
        command: quoted for a shell.
    """
    try:
        words = shlex.split(command)
    except ValueError:  # a quotation that does not end
        return _masked_inside(command)
    shown, before = [], ""
    for word in words:
        name, equals, value = word.partition("=")
        if before.startswith("--") and "=" not in before and not word.startswith("-") and is_secret(before, word):
            shown.append(MASK)
        elif equals and is_secret(name, value):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(_masked_inside(word))
        before = word
    return command if shown == words else shlex.join(shown)


def _masked_inside(text: str) -> str:
    """A text such as `tracker={api_key:abc,mode:online}`, or a URL with a token in it."""
    parts, shown_until = [], 0
    for named in NAMED.finditer(text):
        if named.start() < shown_until or not (COUNTED.search(named[1]) or NEVER_SHOWN.search(named[1])):
            continue
        value = VALUE.match(text, named.end())
        if value and is_secret(named[1], value[0]):
            parts += [text[shown_until : value.start()], MASK]
            shown_until = value.end()
    return "".join([*parts, text[shown_until:]])
