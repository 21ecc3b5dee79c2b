"""python become.py UID GID GROUPS COMMAND...: becomes a user, for good, then the command.

Root only may enter a network namespace; what runs inside is the user's. Imports nothing of the package, so that it
needs no PYTHONPATH, which the command would inherit.
"""

import os
import signal
import sys
import warnings  # noqa: F401  os.execvp imports it, which is too late for a user who cannot read it

CANNOT_RUN = 126  # as shells say it


def main() -> None:
    """Never comes back."""
    uid, gid, groups, *command = sys.argv[1:]
    os.setgroups([int(group) for group in groups.split(",")])
    os.setresgid(int(gid), int(gid), int(gid))
    os.setresuid(int(uid), int(uid), int(uid))
    for name in ("SIGPIPE", "SIGXFSZ"):  # which Python ignores, and its children would, too
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be run by user {uid}: {error.strerror}", file=sys.stderr)
        raise SystemExit(CANNOT_RUN) from None


if __name__ == "__main__":
    main()
