"""Numbers as people read them."""


def human_bytes(count: float) -> str:
    """1234567 as 1.23 MB (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def counted(count: int, noun: str) -> str:
    """`1 worker`, `4 workers`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
