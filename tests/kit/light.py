"""The command line in processes that have not imported torch, forked by one interpreter: imports take longest.

python -m tests.kit.light reads a list of argument lists in JSON, and writes [status, output, errors] of each.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from accordion_bench.options.conf_dir import conf_dir

TORCH = 77  # the exit status where torch was imported


def light(commands: Sequence[Sequence[str]], folder: Path) -> list[subprocess.CompletedProcess]:
    """Run `accordion_bench` with each list of arguments, in a folder.

    Returns:
        one result per command; its status is `TORCH` where the command has imported torch.
    """
    environ = {"PYTHONPATH": str(conf_dir().parent), "PATH": ""}
    arguments = [sys.executable, "-m", "tests.kit.light"]
    given = json.dumps([list(words) for words in commands])
    done = subprocess.run(
        arguments, input=given, cwd=folder, env=environ, capture_output=True, text=True, timeout=120, check=True
    )
    return [
        subprocess.CompletedProcess(words, *told) for words, told in zip(commands, json.loads(done.stdout), strict=True)
    ]


def _forked(words: list[str]) -> tuple[int, str, str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            sys.argv[1:] = words
            _end(_status())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return status, *(file.seek(0) or file.read() for file in (out, errors))


def _status() -> int:
    """What the command ends with."""
    from accordion_bench.__main__ import main

    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _end(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(TORCH if "torch" in sys.modules else status)


if __name__ == "__main__":
    import hydra.utils  # noqa: F401
    import yaml  # noqa: F401

    import accordion_bench.__main__
    import accordion_bench.cli.sweep  # noqa: F401

    assert "torch" not in sys.modules
    sys.argv[0] = "accordion_bench"
    print(json.dumps([_forked(words) for words in json.load(sys.stdin)]))
