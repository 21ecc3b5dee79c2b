"""Text of anybody's as Markdown that shows it, and makes no link, image, HTML or code of it."""

import re
import textwrap

ESCAPED = re.compile(
    r"""[\\`$]                  # code, formulas, and what would take away an escape of ours
      | <(?=[a-zA-Z/!?])        # HTML, or a link in angle brackets
      | (?<=\])[(\[:]           # what stands behind [text]: a link, an image, where a name leads to
      | (?<=:)//                # an address, which some readers make a link of, as of the next one
      | (?<=www)\.""",
    re.VERBOSE | re.IGNORECASE,
)
FIRST = "#>~*+-[="  # with which something else begins than a line of text
WIDTH = 120
KEPT = ("|", "#", "![", "    ", "```", "<")  # tables, headings, pictures, code, comments
MARKER = re.compile(r"(?:[-*] |\d+\. )?")
BEGINS = re.compile(r" (?=[#>~*+=|-]|\d+[.)](?: |$))")  # a space behind which a list, a quote or a heading would begin


def inline(text: str) -> str:
    """One line of text inside a line of Markdown."""
    return ESCAPED.sub(r"\\\g<0>", text)


def line(text: str) -> str:
    """The same where a line or an entry of a list begins with it."""
    return f"\\{inline(text)}" if text.startswith(tuple(FIRST)) else inline(text)


def folded(text: str) -> str:
    """A page of Markdown whose paragraphs and list entries have lines of at most `WIDTH` characters.

    Args:
        text: the page, a paragraph or an entry on each line. Tables, headings, pictures and code stay as they are.

    Returns:
        The page; it is shown as before.
    """
    lines, code = [], False
    for row in text.split("\n"):
        code ^= row.startswith("```")
        kept = code or len(row) <= WIDTH or row.startswith(KEPT)
        lines += [row] if kept else _filled(row)
    return "\n".join(lines)


def _filled(row: str) -> list[str]:
    """One line as several, of which none but the first begins with what would be a list, a quote or a heading."""
    marker = "".join(MARKER.findall(row)[:1])
    bound = BEGINS.sub("\0", row.removeprefix(marker))
    lines = textwrap.TextWrapper(WIDTH, marker, " " * len(marker), break_long_words=False, break_on_hyphens=False)
    return [one.replace("\0", " ") for one in lines.wrap(bound)]
