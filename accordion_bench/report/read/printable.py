"""What a stranger's files say, made printable once, where it is read: nothing later has to look at it again.

A name with a newline would be a line of its own in a table, one with an escape sequence a command to the terminal, one
that is half of a character (a surrogate) could not be written at all.
"""

from typing import Any

NAME, SENTENCE, TEXT = 200, 1000, 10_000  # letters that are kept: of labels, of keys, of texts such as a command
LARGEST = 2**63  # of integers; what is larger becomes a float, which may be infinite


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
    if isinstance(content, int) and not isinstance(content, bool) and abs(content) > LARGEST:
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
