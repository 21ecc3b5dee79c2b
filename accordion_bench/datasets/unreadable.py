"""Error messages for users' files that cannot be read."""

from pathlib import Path

from accordion_bench.options.checks import ConfigError


class Unreadable(ConfigError):
    """A file cannot be read in its expected format; `str()` names the file and the reason."""


def why(file: Path, error: BaseException) -> str:
    """Return the reason for an error raised while a file was read, as a clause that follows the file's name."""
    if isinstance(error, FileNotFoundError):
        return "which is a broken link" if file.is_symlink() else "which no longer exists"
    if isinstance(error, PermissionError):
        return "which may not be read by this user"
    try:
        if file.is_file() and not file.stat().st_size:
            return "which is empty"
    except OSError:  # the folder may not be accessible
        pass
    if isinstance(error, MemoryError):
        return "which is larger than the free memory"
    return f"which cannot be read ({type(error).__name__}: {' '.join(str(error).split())})"


def refusal(what: str, file: Path, reason: str, others: int = 0) -> Unreadable:
    """Return the error for a file that cannot be used.

    Args:
        what: noun for the expected files in the message.
        file: path of the file.
        reason: result of `why`.
        others: number of further files with errors.
    """
    also = f", and {others:,} more like it" if others else ""
    return Unreadable(f"paths.data must hold {what}, got {file}, {reason}{also}; restore or remove that file")
