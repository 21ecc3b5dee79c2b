"""Memory of a process: what torch frees on the CPU is kept for its next tensors."""

import ctypes
import sys
from collections.abc import Callable

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST_KEPT = 256 * 2**20  # bytes of one tensor


def keep_freed_memory() -> bool:
    """Let this process keep what it has freed, up to tensors of 256 MiB, instead of giving it back to the system.

    glibc takes every block above 32 MiB from the system anew and gives it back when it is freed, so that each page of
    a large activation faults in every step: docs/performance.md. Costs nothing but that the process stays as large as
    it was at its largest. It cannot be undone.

    Returns:
        whether it was done; other C libraries (macOS, musl) have no such option.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def give_back() -> None:
    """Give back to the system what is free at the moment; what is freed later is kept as before."""
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc's; None where another C library has none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), name)
    except AttributeError:
        return None
