"""The pages of the documentation, and the commands and programs in them."""

import itertools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.kit.paths import ROOT

FOUND = [file for pattern in ("*.md", "docs/**/*.md", "examples/*/README.md") for file in ROOT.glob(pattern)]
PAGES = sorted(file.relative_to(ROOT) for file in FOUND if file.name not in ("CHANGELOG.md", "SECURITY.md"))
PROSE = sorted({*PAGES, *(file.relative_to(ROOT) for file in ROOT.glob("results/**/README.md"))})
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
CODE = re.compile(rf"{FENCED.pattern}|(?<=\n\n)(?: {{4}}.*?\n)+", FENCED.flags)  # fenced, or indented
ASSIGNED = re.compile(r"(\w+)=(\S+)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Args:
        page: path of the page in the checkout.
        language: `bash`, `python`; "" = not given.
        text: content of the block.
    """

    page: Path
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command as parsed by the shell: words without quotes, with the variables of the block replaced."""

    page: Path
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def long_lines(page: Path, width: int = 120) -> list[str]:
    """Return the lines of a page longer than `width` characters, except tables, headings, pictures and code."""
    text = CODE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    return [line for line in text.splitlines() if len(line) > width and not line.startswith(("|", "#", "!["))]


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [Block(page, *found) for found in FENCED.findall((ROOT / page).read_text(encoding="utf-8"))]


def commands(block: Block) -> list[Command]:
    """Return the commands of a block of bash in order, including those after `&&`."""
    found, variables = [], dict[str, str]()
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if assigned := ASSIGNED.fullmatch(line):
            variables[assigned[1]] = assigned[2]
            continue
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        words = shlex.split(line)
        parts = itertools.groupby(words, lambda word: word == "&&")
        found += [Command(block.page, tuple(part)) for between, part in parts if not between]
    return found


def inline(page: Path) -> list[Command]:
    """Return the commands in backticks within the sentences of a page."""
    text = FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))
    found = re.findall(r"`((?:python -m|make|bash)\s[^`]+)`", text)
    return [Command(page, tuple(shlex.split(command))) for command in found]
