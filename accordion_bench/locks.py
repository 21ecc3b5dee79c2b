"""Locks between processes; on a file system without locks, a file that its owner renews."""

import contextlib
import errno
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLease, Timeout

POLL = 0.2  # seconds between two looks at a lock that is held
LEASE = 30.0  # seconds without a renewal after which an owner counts as gone
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # what a file system without them says


class Taken(Exception):
    """Another process holds the lock."""


@contextlib.contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[None]:
    """Keep other processes out. The lock goes with the process, however that ends; its file stays there, empty.

    On a file system without locks a file beside it says who the owner is (host, process and its start); the owner
    renews it, and one that has not for `LEASE` seconds counts as gone. In a folder that cannot be written, or on a full
    disk, no process is kept out: none can do anything there.

    Args:
        path: of the lock.
        wait: until no other process holds it.

    Raises:
        Taken: another process holds it, and there is no waiting.
    """
    lock = _acquire(path, wait)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _acquire(path: Path, wait: bool) -> BaseFileLock | None:
    # no soft lock here: it would outlive a process that is killed
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
    # an owner elsewhere cannot be asked whether it lives: it has so long to renew its file
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
    """Say once that there are no locks."""
    print(
        f"warning: {folder} is on a file system without locks: a file {owner}, renewed every {LEASE / 3:.0f} s, keeps "
        "other processes out",
        file=sys.stderr,
    )
