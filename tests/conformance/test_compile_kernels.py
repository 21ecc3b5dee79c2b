"""Kernels that were compiled once are not compiled again."""

import os
import subprocess
import sys

import pytest

from accordion_bench.tensors import kernels
from tests.kit.paths import ROOT


@pytest.mark.slow
@pytest.mark.skipif(not kernels.installed(), reason="numba is not installed")
@pytest.mark.parametrize("name", ["efsignsgd", "qsgd", "topk", "threshold"])
def test_a_run_after_it_compiles_nothing(tmp_path, name):
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept"), "NUMBA_DEBUG_CACHE": "1"}

    def compiled(*words: str) -> int:
        """How many kernels a command has written to disk."""
        command = [sys.executable, "-m", *words]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True, timeout=280)
        return done.stdout.count("data saved to")

    assert compiled("accordion_bench.conformance.compile_kernels", name) > 5
    assert compiled("accordion_bench", f"compressor={name}", "epochs=1", f"paths.runs={tmp_path / 'runs'}") == 0
