"""Run a command as another user: `python become.py UID GID GROUPS COMMAND...`.

Only root may enter a network namespace, and the job inside must run as the user. The script permanently changes to the
user and executes the command. It imports nothing of the package, since the command would inherit its PYTHONPATH.
"""

import os
import signal
import sys
import warnings  # noqa: F401  imported by os.execvp, when the new user may be unable to read the file

CANNOT_RUN = 126  # exit status of shells for a command that cannot be executed


def main() -> None:
    """Change the user and execute the command; does not return."""
    uid, gid, groups, *command = sys.argv[1:]
    os.setgroups([int(group) for group in groups.split(",")])
    os.setresgid(int(gid), int(gid), int(gid))
    os.setresuid(int(uid), int(uid), int(uid))
    for name in ("SIGPIPE", "SIGXFSZ"):  # ignored by Python, and inherited by its children
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be run by user {uid}: {error.strerror}", file=sys.stderr)
        raise SystemExit(CANNOT_RUN) from None


if __name__ == "__main__":
    main()
