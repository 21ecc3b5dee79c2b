"""Numbers as people read them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


def human_bytes(count: float) -> str:
    """1234567 as 1.23 MB (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
