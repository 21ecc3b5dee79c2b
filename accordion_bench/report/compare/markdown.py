"""Text of anybody's as Markdown that shows it, and makes no link, image, HTML or code of it."""

import re

ESCAPED = re.compile(
    r"""[\\`$]                  # code, formulas, and what would take away an escape of ours
      | <(?=[a-zA-Z/!?])        # HTML, or a link in angle brackets
      | (?<=\])[(\[:]           # what stands behind [text]: a link, an image, where a name leads to
      | (?<=:)//                # an address, which some readers make a link of, as of the next one
      | (?<=www)\.""",
    re.VERBOSE | re.IGNORECASE,
)
FIRST = "#>~*+-[="  # with which something else begins than a line of text


def inline(text: str) -> str:
    """One line of text inside a line of Markdown."""
    return ESCAPED.sub(r"\\\g<0>", text)


def line(text: str) -> str:
    """The same where a line or an entry of a list begins with it."""
    return f"\\{inline(text)}" if text.startswith(tuple(FIRST)) else inline(text)
