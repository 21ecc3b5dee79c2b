"""User who called sudo: the lab requires root, but its jobs run as that user, who owns all files."""

import contextlib
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from accordion_bench.options.checks import ConfigError, ValueRefused

LAUNCHER = Path(__file__).with_name("become.py")


@dataclass(frozen=True)
class User:
    """User other than root.

    Args:
        uid, gid, groups: numbers of user and groups.
        name, home: name and home directory.
    """

    uid: int
    gid: int
    groups: tuple[int, ...]
    name: str
    home: str

    def environment(self) -> dict[str, str]:
        """Return the variables that a login sets."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def command(self) -> list[str]:
        """Return the prefix that makes a command of root run as this user."""
        groups = ",".join(map(str, self.groups))
        return [sys.executable, "-I", str(LAUNCHER), str(self.uid), str(self.gid), groups]

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Context with this user's file permissions and ownership. No other threads may run in it."""
        gid, groups = os.getegid(), os.getgroups()
        os.setgroups(self.groups)
        os.setegid(self.gid)
        os.seteuid(self.uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(gid)
            os.setgroups(groups)

    def refuse_unreadable(self) -> None:
        """Raise ConfigError if the user cannot run this Python or read this package."""
        try:
            tried = subprocess.run(
                [sys.executable, "-c", "import accordion_bench.options.conf_dir"],
                env={**os.environ, **self.environment()},
                user=self.uid,
                group=self.gid,
                extra_groups=self.groups,
                capture_output=True,
                text=True,
            )
            said = tried.stderr.strip().splitlines()[-1:] or [f"exit status {tried.returncode}"]
            why = said[0] if tried.returncode else ""
        except OSError as error:
            why = str(error.strerror)
        if why:
            raise ConfigError(
                f"{sys.executable} and accordion_bench must be readable for {self.name}, who called sudo and whom "
                f"training belongs to, got: {why}; install where that user can read, or, to train as root, type "
                "sudo env -u SUDO_UID and the same command"
            )


def caller() -> User | None:
    """Return the user who called sudo; None without sudo or if root called it.

    Raises:
        ConfigError: SUDO_UID or SUDO_GID is no number.
    """
    if os.geteuid() != 0 or "SUDO_UID" not in os.environ:
        return None
    uid, gid = (_number(key) for key in ("SUDO_UID", "SUDO_GID"))
    if uid == 0:
        return None
    try:
        known = pwd.getpwuid(uid)
    except KeyError:  # users without an account entry are allowed
        return User(uid, gid, (gid,), str(uid), "/")
    return User(uid, gid, tuple(os.getgrouplist(known.pw_name, gid)), known.pw_name, known.pw_dir)


@contextlib.contextmanager
def acting(user: User | None) -> Iterator[None]:
    """Context with the file permissions of a user; None = root.

    Raises:
        ConfigError: the user may not write a file.
    """
    try:
        with user.acting() if user else contextlib.nullcontext():
            yield
    except PermissionError as error:
        whose = user.name if user else "root"
        raise ConfigError(
            f"netlab must write where {whose} may, got {error.filename}; type another --out or TMPDIR=/tmp"
        ) from error


def _number(key: str) -> int:
    text = os.environ.get(key, "")
    if not text.isascii() or not text.isdigit() or int(text) >= 2**32 - 1:
        raise ValueRefused(key, "a number, as sudo sets it", text or "nothing", 1000)
    return int(text)
