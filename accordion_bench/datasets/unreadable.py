"""What is wrong with a user's file, as the end of a sentence that begins with its name."""

from pathlib import Path

from accordion_bench.options.checks import ConfigError


class Unreadable(ConfigError):
    """A file that cannot be read as what it should be; `str()` says which and why."""


def why(file: Path, error: BaseException) -> str:
    """The reason, of whatever has happened while the file was read."""
    if isinstance(error, FileNotFoundError):
        return "which is a link that leads nowhere" if file.is_symlink() else "which is not there any more"
    if isinstance(error, PermissionError):
        return "which may not be read by this user"
    try:
        if file.is_file() and not file.stat().st_size:
            return "which is empty"
    except OSError:  # the folder may not be looked into
        pass
    if isinstance(error, MemoryError):
        return "which is larger than the memory that is free"
    return f"which cannot be read ({type(error).__name__}: {' '.join(str(error).split())})"


def refusal(what: str, file: Path, reason: str, others: int = 0) -> Unreadable:
    """The sentence.

    Args:
        what: `paths.data` must hold.
        file: that is none.
        reason: from `why`.
        others: files with which something is wrong, too.
    """
    also = f", and {others:,} more like it" if others else ""
    return Unreadable(f"paths.data must hold {what}, got {file}, {reason}{also}; restore or remove that file")
