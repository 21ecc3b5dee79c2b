"""Locks between processes; on file systems without locks, a lease file that its owner renews."""

import contextlib
import errno
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLease, Timeout

POLL = 0.2  # interval in seconds between attempts to acquire a lock
LEASE = 30.0  # seconds without renewal after which a lease expires
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # errors of file systems without locks


class Taken(Exception):
    """Another process holds the lock."""


@contextlib.contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive lock within the block. It is released even if the process is killed; its empty file remains.

    On a file system without locks, a file next to it names the owner (host, process and its start). The owner renews
    it, and a lease that was not renewed for `LEASE` seconds has expired. In a folder that cannot be written, or on a
    full disk, no lock is held, because no process can write anything there.

    Args:
        path: path of the lock file.
        wait: whether to wait until no other process holds the lock.

    Raises:
        Taken: another process holds the lock, and `wait` is False.
    """
    lock = _acquire(path, wait)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _acquire(path: Path, wait: bool) -> BaseFileLock | None:
    # no soft lock, because it would remain after a process is killed
    lock = FileLock(path, timeout=-1 if wait else 0, poll_interval=POLL, fallback_to_soft=False)
    try:
        lock.acquire()
        return lock
    except Timeout:
        raise Taken from None
    except NotImplementedError:
        pass
    except OSError as error:
        if error.errno not in NO_LOCKS:
            return None
    owner = path.with_suffix(".owner")
    tell(path.parent.parent, owner.name)
    return _acquire_owner_file(owner, wait)


def _acquire_owner_file(path: Path, wait: bool) -> BaseFileLock | None:
    # whether an owner on another host is alive shows only in its renewals, so wait longer than a lease
    patience = -1 if wait else 1.5 * LEASE
    lease = SoftFileLease(path, lease_duration=LEASE, timeout=patience, poll_interval=POLL, thread_local=False)
    try:
        lease.acquire()
        return lease
    except Timeout:
        raise Taken from None
    except OSError:
        return None


@functools.cache
def tell(folder: Path, owner: str) -> None:
    """Warn once that the file system has no locks."""
    print(
        f"warning: {folder} is on a file system without locks: a file {owner}, renewed every {LEASE / 3:.0f} s, keeps "
        "other processes out",
        file=sys.stderr,
    )
