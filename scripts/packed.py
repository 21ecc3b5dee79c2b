"""Text files that are stored compressed: `xzcat FILE` shows one."""

import lzma
from pathlib import Path

from accordion_bench.runs import durable


def read_packed(path: Path) -> str:
    """Return the text of an .xz file.

    Raises:
        ValueError: the file is not compressed, or contains no text.
    """
    try:
        return lzma.decompress(path.read_bytes()).decode()
    except lzma.LZMAError as refused:
        raise ValueError(str(refused)) from None


def write_packed(path: Path, text: str) -> None:
    """Write an .xz file atomically: a reader sees the old text or the new one."""
    part = path.with_name(f"{path.name}.part")
    with durable.new_file(part) as file:
        file.write(lzma.compress(text.encode(), preset=9))
    durable.replace(part, path)
