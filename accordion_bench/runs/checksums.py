"""Checksums (CRC-32) inside of a run's own text files, so that damage is told: a flipped digit is as good a digit.

A JSON object ends with `"crc32": "0a1b2c3d"`, a YAML file with the line `# crc32: 0a1b2c3d`; each is of all that stands
before its digits. What has none, as files of earlier versions, is read as it is. Whoever changes a file on purpose
leaves the checksum out.
"""

import json
import re
import zlib
from typing import Any

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
