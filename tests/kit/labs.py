"""Calls of `python -m accordion_bench.netlab`."""

import os
import subprocess
import sys
import tempfile

from tests.kit.paths import ROOT


def lab(*words: str, timeout: float = 300, **environ: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "accordion_bench.netlab", *words]
    with tempfile.TemporaryDirectory() as logs:  # logs of failures are kept
        env = {**os.environ, "TMPDIR": logs, **environ}
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)
